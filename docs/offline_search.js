// Browsers start no worker from a file. The search's is then a script in a hidden frame, which
// hears and answers as a worker does.
if (location.protocol === "file:") {
  window.Worker = class extends EventTarget {
    constructor(url) {
      super();
      const frame = document.createElement("iframe");
      frame.hidden = true;
      document.body.append(frame);
      this.inside = frame.contentWindow;
      this.inside.postMessage = (data) =>
        this.dispatchEvent(new MessageEvent("message", { data }));
      const script = this.inside.document.createElement("script");
      this.started = new Promise((resolve) => (script.onload = resolve));
      script.src = url;
      this.inside.document.body.append(script);
    }
    postMessage(data) {
      this.started.then(() =>
        this.inside.dispatchEvent(new MessageEvent("message", { data })));
    }
  };
}
