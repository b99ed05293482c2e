// Something that is loaded when it is first used.

/** Returns a function that gives what `load` gave, or null until it is there. `then` is called once it is there. */
export function once(load) {
  let loaded = null;
  let loading = null;
  return (then) => {
    if (loaded !== null) return loaded;
    loading ??= load().then(
      (result) => (loaded = result),
      () => (loading = null), // the server is gone: the next use tries again
    );
    loading.then((result) => result !== null && then());
    return null;
  };
}
