// An error whose message the page shows as it is.
export class Fault extends Error {
  name = "Fault";
}
