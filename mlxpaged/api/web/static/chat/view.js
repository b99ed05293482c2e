// The chat: conversations at the side, the messages of one of them, and the form to write in.
import { announce, button, h } from "../lib/dom.js";
import { device } from "../lib/storage.js";
import { AnswerMessage, editor, userMessage } from "./message.js";
import { receive } from "./answer.js";
import { Composer } from "./composer.js";
import { asRequest, asStored, Conversations, newId } from "./conversations.js";
import { EmptyPage } from "./empty.js";
import { ModelPicker } from "./models.js";
import { editSettings, fields, keepSettings, lastSettings } from "./settings.js";
import { startShortcuts } from "./shortcuts.js";
import { showPrompt } from "./prompt.js";
import { Sidebar } from "./sidebar.js";
import { importFile } from "./transfer.js";
import { branchOff, choose, placeOf } from "./versions.js";

const LAST_MODEL = "mlxpaged-model";

export class ChatView {
  constructor() {
    this.conversations = new Conversations((id) => this.follow(id));
    this.current = null;
    this.running = new Map(); // by conversation id: the AbortController of its answer
    this.answers = new WeakMap(); // by message: what draws it
    this.picker = new ModelPicker((model) => this.chooseModel(model));
    this.sidebar = new Sidebar({
      add: () => this.startChat(),
      rename: (conversation, title) => this.rename(conversation, title),
      remove: (conversation) => this.remove(conversation),
      takeFile: (file) => importFile(file, this.conversations).then(() => this.showSidebar()),
      showShortcuts: () => showShortcuts(),
    });
    this.title = h("h1", { tabindex: "-1" }, "New chat");
    this.chats = button("Chats", () => this.toggleSidebar(), {
      class: "quiet narrow",
      "aria-expanded": "false",
      "aria-controls": "conversations",
    });
    this.messages = h("div", { class: "messages" });
    this.empty = new EmptyPage((text) => this.composer.suggest(text));
    this.composer = new Composer({
      maySend: () => !this.running.has(this.current.id),
      send: (text, files) => this.say(text, files),
      stop: () => this.stopAnswer(),
      earlierFiles: () => this.current.messages.flatMap(({ files = [] }) => files),
      whyNoImages: () => this.whyNoImages(),
    });
    this.bar = h(
      "div",
      { class: "bar" },
      this.chats,
      this.title,
      this.picker.element,
      button("Settings", () => this.editSettings(), { class: "quiet" }),
    );
    this.column = h("section", { class: "conversation" }, this.bar, this.messages, this.composer.element);
    this.element = h("div", { class: "chat" }, this.sidebar.element, this.column);
    this.composer.takeDrops(this.element);
    const showShortcuts = startShortcuts(this.element, {
      newChat: () => this.startChat(),
      search: () => this.searchChats(),
      write: () => this.composer.focus(),
    });
    this.loaded = this.conversations.load();
    document.addEventListener("keydown", (event) => {
      if (event.key === "Escape" && !event.shiftKey && this.element.isConnected && !document.querySelector("dialog[open]")) this.stopAnswer();
    });
    document.addEventListener("key-changed", () => this.element.isConnected && this.loadModels());
    document.addEventListener("visibilitychange", () => document.hidden && this.keepRunning());
    addEventListener("pagehide", () => this.running.forEach((control) => control.abort())); // as the browser does
  }

  /** id: of a conversation; empty for a new one. */
  async enter(id) {
    await this.loaded;
    const known = this.conversations.get(id);
    if (this.current === null || (known !== null && known !== this.current) || (id === "new" && this.current.messages.length)) {
      this.show(known ?? this.newConversation());
    }
    this.loadModels();
  }

  leave() {}

  /** Shows what another tab has made of a conversation. Only a deletion ends an answer that is written here. */
  async follow(id) {
    await this.loaded;
    const found = await this.conversations.stored(id);
    if (found && this.running.has(id)) return this.takeOver(found);
    this.running.get(id)?.abort();
    if (found) this.conversations.byId.set(id, found);
    else this.conversations.byId.delete(id);
    if (this.current?.id === id) this.show(found ?? this.newConversation());
    else this.showSidebar();
  }

  /** Takes over what another tab has saved of a conversation in which an answer is written here. */
  takeOver(found) {
    const own = this.conversations.get(found.id);
    const answer = own?.messages.find((message) => message.running);
    // The other tab does not know the answer yet, or has left it.
    if (!answer || !found.messages.some(({ id }) => id === answer.id)) return;
    const messages = found.messages.map((message) => (message.id === answer.id ? answer : message));
    Object.assign(own, found, { messages });
    if (this.current === own) {
      this.title.textContent = own.title;
      this.draw();
    }
    this.showSidebar();
  }

  newConversation() {
    const settings = this.current?.settings ?? lastSettings();
    const conversation = this.conversations.add(device.getItem(LAST_MODEL) ?? "", structuredClone(settings));
    this.conversations.byId.delete(conversation.id); // it is kept from its first message on
    return conversation;
  }

  async loadModels() {
    try {
      await this.picker.load();
      this.problem?.remove();
    } catch (error) {
      this.showProblem(error.message);
    }
    this.showModel();
  }

  showProblem(text) {
    this.problem?.remove();
    this.problem = h("p", { class: "notice error", role: "alert" }, text, " ", button("Try again", () => this.loadModels()));
    this.bar.after(this.problem);
  }

  showModel() {
    const { model, messages } = this.current;
    const known = this.picker.get(model) !== null || messages.length > 0;
    this.current.model = this.picker.show(known ? model : "") ?? model; // the list may not be there yet
    this.empty.show(this.picker.get(this.current.model));
  }

  chooseModel(model) {
    this.current.model = model;
    this.empty.show(this.picker.get(model));
    device.setItem(LAST_MODEL, model);
    this.keep(this.current);
  }

  whyNoImages() {
    return this.picker.whyNoImages(this.current?.model); // a file may come before the first chat is there
  }

  async editSettings() {
    const settings = await editSettings(this.current.settings, this.picker.get(this.current.model));
    if (settings === null) return;
    this.current.settings = settings;
    keepSettings(settings);
    this.keep(this.current);
  }

  /** Saves a conversation that has messages. */
  async keep(conversation) {
    if (conversation.messages.length === 0) return;
    this.conversations.byId.set(conversation.id, conversation);
    const stored = asStored(conversation);
    try {
      await this.conversations.save(stored);
      conversation.updated = stored.updated;
    } catch (error) {
      this.showProblem(`The browser cannot keep this chat: ${error.message}`);
    }
    this.showSidebar();
  }

  /** A hidden page may be left, or ended by the system: what there is of the answers is saved. */
  keepRunning() {
    for (const id of this.running.keys()) {
      const conversation = this.conversations.get(id);
      if (conversation !== null) this.keep(conversation); // else it was deleted
    }
  }

  showSidebar() {
    this.sidebar.show(this.conversations.list(), this.current);
  }

  toggleSidebar(open = !this.element.classList.contains("side-open")) {
    this.element.classList.toggle("side-open", open);
    this.chats.setAttribute("aria-expanded", String(open));
  }

  startChat() {
    this.show(this.newConversation());
    if (location.hash !== "#/chat") history.pushState(null, "", "#/chat");
    this.showModel();
    this.composer.focus();
  }

  searchChats() {
    this.toggleSidebar(true);
    this.sidebar.search.focus();
  }

  rename({ id }, title) {
    const conversation = this.conversations.get(id); // another tab may have changed it while the dialog was open
    if (conversation === null) return;
    conversation.title = title;
    conversation.named = true;
    if (conversation === this.current) this.title.textContent = title;
    this.keep(conversation);
    announce("Renamed");
  }

  async remove(conversation) {
    this.running.get(conversation.id)?.abort();
    await this.conversations.remove(conversation.id);
    announce("Deleted");
    if (conversation === this.current) this.startChat();
    else this.showSidebar();
  }

  // -- one conversation --------------------------------------------------------------------------------------------

  show(conversation) {
    this.current = conversation;
    this.toggleSidebar(false);
    this.title.textContent = conversation.title;
    this.showModel();
    this.draw();
    this.showSidebar();
    this.messages.scrollTop = this.messages.scrollHeight;
  }

  draw() {
    const { messages } = this.current;
    if (messages.length === 0) {
      this.messages.replaceChildren(this.empty.element);
    } else {
      this.messages.replaceChildren(...messages.map((message) => this.drawn(message)));
    }
    this.showRunning();
  }

  drawn(message) {
    const choose = (number) => this.chooseVersion(message, number);
    if (message.role !== "assistant") {
      return userMessage(message, { choose, edit: (event) => this.edit(message, event.target.closest("article")) });
    }
    let answer = this.answers.get(message);
    if (answer === undefined) {
      const conversation = this.current;
      answer = new AnswerMessage(message, {
        choose,
        regenerate: () => this.regenerate(),
        showPrompt: () => showPrompt(conversation, message),
        goOn: () => this.goOn(),
        mayGoOn: () => !conversation.settings.schema, // the rest of a JSON text fits no schema
        isLast: () => conversation.messages.at(-1) === message,
        waitsFor: (call) => this.waitsFor(conversation, message, call),
        giveResult: (call, result) => this.giveResult(message, call, result),
      });
      this.answers.set(message, answer);
    } else {
      answer.update();
    }
    return answer.element;
  }

  showRunning() {
    this.composer.show(this.running.has(this.current.id));
  }

  /** versions: of the turn, if this is not its first version. */
  say(text, files, versions) {
    const conversation = this.current;
    if (conversation.messages.length === 0) history.replaceState(null, "", `#/chat/${conversation.id}`);
    if (conversation.messages.length === 0 && !conversation.named) {
      conversation.title = (text || files[0].name).replace(/\s+/g, " ").slice(0, 60);
      this.title.textContent = conversation.title;
    }
    const more = { ...(files.length && { files }), ...(versions && { versions }) };
    conversation.messages.push({ role: "user", content: text, ...more });
    this.answer(conversation);
  }

  edit(message, element) {
    if (this.running.has(this.current.id)) return;
    const form = editor(message, {
      cancel: () => this.draw(),
      whyNoImages: () => this.whyNoImages(),
      send: (text, files) => {
        this.say(text, files, branchOff(this.current.messages, message));
        this.composer.focus();
      },
    });
    element.replaceWith(form.element);
    form.focus();
  }

  regenerate() {
    if (this.running.has(this.current.id)) return;
    const { messages } = this.current;
    this.answer(this.current, branchOff(messages, messages.at(-1)));
    this.composer.focus();
  }

  /** Continues the last answer, which was stopped or has reached its limit. */
  goOn() {
    if (this.running.has(this.current.id)) return;
    const message = this.current.messages.at(-1);
    Object.assign(message, { running: true, error: null, finish: null, stopped: false });
    this.write(this.current, message, { continues: true });
    this.composer.focus();
  }

  chooseVersion(message, number) {
    if (this.running.has(this.current.id)) return;
    const { messages } = this.current;
    const index = messages.indexOf(message);
    const forward = number > placeOf(message).number;
    choose(messages, message, number);
    this.draw();
    this.keep(this.current);
    // The buttons are other ones now. At the last version, the focus goes to the button back.
    const buttons = [...this.messages.children[index].querySelectorAll(".versions button:not(:disabled)")];
    buttons.at(forward ? -1 : 0).focus();
    announce(`Version ${number} of ${placeOf(messages[index]).count}`);
  }

  // -- tools ---------------------------------------------------------------------------------------------------------

  waitsFor(conversation, message, call) {
    const later = conversation.messages.slice(conversation.messages.indexOf(message) + 1);
    return later.every((each) => each.role === "tool" && each.toolCallId !== call.id);
  }

  giveResult(message, call, result) {
    const conversation = this.current;
    conversation.messages.push({ role: "tool", content: result, toolCallId: call.id });
    if (message.toolCalls.some((each) => this.waitsFor(conversation, message, each))) {
      this.draw();
      this.keep(conversation);
    } else {
      this.answer(conversation);
    }
  }

  // -- answers -------------------------------------------------------------------------------------------------------

  answer(conversation, versions) {
    const begun = { content: "", reasoning: "", toolCalls: [], model: "", running: true };
    const message = { role: "assistant", id: newId(), ...begun, ...(versions && { versions }) };
    conversation.messages.push(message);
    return this.write(conversation, message);
  }

  /** Writes the last message of a conversation. continues: it goes on with what there is of it. */
  async write(conversation, message, { continues = false } = {}) {
    const messages = asRequest(conversation, { continues });
    if (!continues) messages.pop();
    const control = new AbortController();
    this.running.set(conversation.id, control);
    this.draw();
    this.scrollDown();
    this.keep(conversation);
    announce("The answer begins");
    try {
      if (!conversation.model) await this.loadModels(); // the user was faster than the list
      message.model = conversation.model;
      const more = continues ? { continue_final_message: true } : {};
      const body = { model: conversation.model, messages, ...fields(conversation.settings), ...more };
      await receive(body, message, {
        signal: control.signal,
        changed: () => {
          this.answers.get(message)?.changed();
          if (this.current === conversation && this.isAtEnd()) requestAnimationFrame(() => this.scrollDown());
        },
      });
    } catch (error) {
      if (control.signal.aborted) message.stopped = true;
      else message.error = error.message;
    }
    message.running = false;
    message.progress = message.comment = null;
    this.running.delete(conversation.id);
    if (this.takesBack(conversation, message)) return this.takeBack(conversation, message.error);
    const followed = this.isAtEnd();
    this.answers.get(message)?.update();
    if (this.current === conversation) {
      this.showRunning();
      if (followed) this.scrollDown();
      if (!message.error) announce(message.stopped ? "The answer is stopped" : `The answer: ${message.content}`);
    }
    if (this.conversations.get(conversation.id) === conversation) this.keep(conversation); // it may have been deleted
  }

  /** Whether a message that brought nothing but an error goes back to the form. It would be in all further prompts. */
  takesBack(conversation, answer) {
    const { content, error, reasoning, toolCalls, versions } = answer;
    const [question, last] = conversation.messages.slice(-2);
    const isNew = last === answer && question.role === "user" && !versions && !question.versions;
    const isBare = error && !content && !reasoning && toolCalls.length === 0;
    return isNew && isBare && this.current === conversation && this.composer.isEmpty();
  }

  async takeBack(conversation, problem) {
    const [{ content, files = [] }] = conversation.messages.splice(-2);
    this.composer.giveBack(content, files, problem);
    if (conversation.messages.length > 0) this.keep(conversation);
    else await this.forget(conversation);
    this.draw();
  }

  /** Makes a conversation a new one again: no message of it has reached the server. */
  async forget(conversation) {
    if (!conversation.named) this.title.textContent = conversation.title = "New chat";
    history.replaceState(null, "", "#/chat");
    await this.conversations.remove(conversation.id);
    this.showSidebar();
  }

  stopAnswer() {
    this.running.get(this.current?.id)?.abort();
    this.composer.focus();
  }

  isAtEnd() {
    const { scrollTop, scrollHeight, clientHeight } = this.messages;
    return scrollHeight - scrollTop - clientHeight < 80;
  }

  scrollDown() {
    this.messages.scrollTop = this.messages.scrollHeight;
  }
}
