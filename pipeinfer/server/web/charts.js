// A value over the last minute as a small line with an area below.

const SECONDS = 60;

export class Chart {
  // colour: name of a custom property; top: the fixed upper end of the scale, or 0.
  constructor(canvas, { colour, top = 0, format }) {
    Object.assign(this, { canvas, colour, top, format });
    this.points = []; // [seconds, value]
    new ResizeObserver(() => this.draw()).observe(canvas);
    document.addEventListener("theme", () => this.draw());
  }

  add(time, value) {
    this.points.push([time, value]);
    while (this.points.length && this.points[0][0] < time - SECONDS - 2) this.points.shift();
    this.draw();
  }

  reset() {
    this.points = [];
    this.draw();
  }

  draw() {
    const { canvas } = this;
    const [width, height] = [canvas.clientWidth, canvas.clientHeight];
    if (!width || !height) return;
    const scale = devicePixelRatio || 1;
    canvas.width = Math.round(width * scale);
    canvas.height = Math.round(height * scale);
    const pen = canvas.getContext("2d");
    pen.setTransform(scale, 0, 0, scale, 0, 0);
    const style = getComputedStyle(document.documentElement);
    const get = (name) => style.getPropertyValue(`--${name}`).trim();
    const most = this.top || round(Math.max(1, ...this.points.map(([, value]) => value)));
    const now = this.points.at(-1)?.[0] ?? 0;
    const x = (time) => width - (now - time) / SECONDS * width;
    const y = (value) => height - 5 - value / most * (height - 22);
    pen.strokeStyle = get("line");
    pen.beginPath();
    pen.moveTo(0, y(most));
    pen.lineTo(width, y(most));
    pen.stroke();
    pen.fillStyle = get("soft");
    pen.font = "10.5px system-ui, sans-serif";
    pen.fillText(this.format(most), 6, y(most) - 3);
    if (this.points.length < 2) return;
    const line = new Path2D();
    this.points.forEach(([time, value], i) => {
      if (i) line.lineTo(x(time), y(value));
      else line.moveTo(x(time), y(value));
    });
    const area = new Path2D(line);
    area.lineTo(x(now), y(0));
    area.lineTo(x(this.points[0][0]), y(0));
    pen.fillStyle = pen.strokeStyle = get(this.colour);
    pen.globalAlpha = 0.16;
    pen.fill(area);
    pen.globalAlpha = 1;
    pen.lineWidth = 1.75;
    pen.lineJoin = "round";
    pen.stroke(line);
  }
}

// A round number that is not below `value`.
function round(value) {
  const power = 10 ** Math.floor(Math.log10(value));
  return power * [1, 1.5, 2, 3, 5, 7, 10].find((n) => n * power >= value);
}
