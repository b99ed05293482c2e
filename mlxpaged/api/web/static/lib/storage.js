// Small values that stay in the browser, or until the page is left if the user lets it keep none.

function usable(find) {
  try {
    find().getItem("");
    return find();
  } catch {
    const values = new Map();
    return {
      getItem: (name) => values.get(name) ?? null,
      setItem: (name, value) => values.set(name, value),
      removeItem: (name) => values.delete(name),
    };
  }
}

export const device = usable(() => localStorage);
export const tab = usable(() => sessionStorage);
