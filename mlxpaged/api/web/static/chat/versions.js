// Versions of a turn: the answer before Regenerate, the message before Edit, and what followed each.
//
// A conversation's `messages` are those that are shown and sent. The first message of a version has `versions`:
// {shown, tails}. tails[i] has the messages of version i, from this turn to the end. That of the shown one is null: they
// are in `messages`. A turn with one version has no `versions`.

/** {number, count} of the shown version, or null if there is only one. */
export function placeOf({ versions }) {
  return versions ? { number: versions.shown + 1, count: versions.tails.length } : null;
}

/** Takes a message and those after it out of `messages`, and keeps them as a version. Returns the `versions` of the
 * message that comes in its place, or undefined. An attempt that brought nothing but an error is not kept. */
export function branchOff(messages, message) {
  const tail = messages.splice(messages.indexOf(message));
  const versions = message.versions ?? { shown: 0, tails: [null] };
  delete message.versions;
  if (!message.error || message.content || message.reasoning) {
    versions.tails[versions.shown] = tail;
    versions.shown = versions.tails.push(null) - 1;
  }
  return versions.tails.length > 1 ? versions : undefined;
}

/** Puts another version in the place of a message and those after it. number: 1 is the first. */
export function choose(messages, message, number) {
  const { versions } = message;
  const tail = versions.tails[number - 1];
  if (!tail) return;
  versions.tails[versions.shown] = messages.splice(messages.indexOf(message));
  delete message.versions;
  versions.tails[number - 1] = null;
  versions.shown = number - 1;
  tail[0].versions = versions;
  messages.push(...tail);
}
