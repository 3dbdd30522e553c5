// Search in pages that are opened from disk. The theme searches in a Worker, which browsers do not
// start over file://. There, this class runs the worker's script in a hidden frame instead. The
// theme's plugin `offline` would load a similar class from the network, unless the name of a script
// in mkdocs.yml contains "iframe-worker".
if (location.protocol === "file:") {
  window.Worker = class extends EventTarget {
    constructor(url) {
      super()
      const frame = document.createElement("iframe")
      frame.hidden = true
      this.started = new Promise((started) => {
        frame.onload = () => {
          const inside = frame.contentWindow
          const script = inside.document.createElement("script")
          // The worker answers with postMessage(data)
          inside.postMessage = (data) => this.dispatchEvent(new MessageEvent("message", { data }))
          script.onload = () => started(inside)
          script.src = url
          inside.document.head.append(script)
        }
      })
      document.body.append(frame)
    }

    async postMessage(data) {
      const inside = await this.started
      inside.dispatchEvent(new inside.MessageEvent("message", { data }))
    }
  }
}
