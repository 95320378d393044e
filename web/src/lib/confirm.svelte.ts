/** A question before something is done that cannot be undone. */

export interface Question {
  title: string;
  /** What will happen, in sentences. */
  says: string[];
  /** Things it happens to. */
  names?: string[];
  action: string;
  /** Has to be typed. */
  typed?: string;
  /** A choice beside it. */
  option?: { label: string; hint: string };
  command?: string;
}

interface Open extends Question {
  answer: (result: { yes: boolean; option: boolean }) => void;
}

let open = $state.raw<Open | null>(null);

export const question = {
  get open(): Open | null {
    return open;
  },
  close(yes: boolean, option: boolean): void {
    open?.answer({ yes, option });
    open = null;
  },
};

export function confirm(what: Question): Promise<{ yes: boolean; option: boolean }> {
  return new Promise((answer) => {
    open?.answer({ yes: false, option: false });
    open = { ...what, answer };
  });
}
