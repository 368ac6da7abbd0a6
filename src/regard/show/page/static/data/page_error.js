// What went wrong, as a sentence to show where it happened.
export class Fault extends Error {
  name = "Fault";
}
