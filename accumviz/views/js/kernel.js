/** A notebook's side of a view: its kernel hears of each change. */

/** @import { Model, Notebook } from "./types.d.ts" */

/** A notebook's model, to which each change is told at once. @param {Notebook} model @returns {Model} */
export const heard = (model) => ({
  get: (key) => model.get(key),
  set(key, value) {
    model.set(key, value);
    model.save_changes();
  },
  on: (name, listener) => model.on(name, listener),
});
