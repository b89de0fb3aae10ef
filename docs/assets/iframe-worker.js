// Search in pages from the file system, where browsers refuse to start workers: runs the script of a worker in a hidden frame.
"use strict";

if (location.protocol === "file:") {
  window.Worker = class extends EventTarget {
    constructor(url) {
      super();
      const frame = document.createElement("iframe");
      frame.hidden = true;
      document.body.append(frame);
      this.frame = frame;
      this.sent = []; // messages until the script has been loaded
      const scope = frame.contentWindow;
      scope.postMessage = (data) => this.dispatchEvent(new MessageEvent("message", { data })); // from the worker to the page
      scope.importScripts = (...urls) => urls.reduce((done, next) => done.then(() => load(scope, next)), Promise.resolve());
      load(scope, new URL(url, document.baseURI)).then(() => {
        const sent = this.sent;
        this.sent = null;
        for (const data of sent) this.postMessage(data);
      });
    }

    postMessage(data) {
      if (this.sent) this.sent.push(data);
      else this.frame.contentWindow.dispatchEvent(new MessageEvent("message", { data }));
    }

    terminate() {
      this.frame.remove();
    }
  };
}

function load(scope, url) {
  return new Promise((done, failed) => {
    const script = scope.document.createElement("script");
    script.src = url;
    script.onload = done;
    script.onerror = () => failed(new Error(`${url} can't be loaded`));
    scope.document.head.append(script);
  });
}
