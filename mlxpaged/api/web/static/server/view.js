import { h } from "../lib/dom.js";
export class ServerView { constructor() { this.element = h("div", {}); } enter() {} leave() {} }
