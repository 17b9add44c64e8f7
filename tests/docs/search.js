// Runs the search of the built site as a browser does: node search.js SITE QUERY...
// Prints for each query the places that it finds, best first, as a line of JSON.
const fs = require("fs"), path = require("path"), vm = require("vm");
const [site, ...queries] = process.argv.slice(2);
const data = JSON.parse(fs.readFileSync(path.join(site, "search.json"), "utf8"));
const workers = path.join(site, "assets/javascripts/workers");
const name = fs.readdirSync(workers).find((file) => /^search\..*\.js$/.test(file));
let place = -1;
const FAILED = 4, FOUND = 3, QUERY = 2, SET_UP = 0; // types of the worker's messages
global.self = {
  postMessage(message) {
    if (message.type === FAILED) process.exit(1);
    if (message.type === FOUND)
      console.log(JSON.stringify(message.data.items.map((one) => data.items[one.id].location)));
    if (++place < queries.length)
      self.onmessage({ data: { type: QUERY, data: { input: queries[place] } } });
  },
};
vm.runInThisContext(fs.readFileSync(path.join(workers, name), "utf8"));
self.onmessage({ data: { type: SET_UP, data } });
