// Shows the recorded values at the pointer, in each chart.
for (const figure of document.querySelectorAll("figure.chart")) {
  const { x: [low, high, log, labels], series } = JSON.parse(figure.querySelector("script").textContent);
  const plot = figure.querySelector(".plot");
  const cursor = figure.querySelector(".cursor");
  const tip = figure.querySelector(".tip");
  const scale = log ? Math.log : (value) => value;
  const place = (x) => (scale(x) - scale(low)) / (scale(high) - scale(low));
  const text = (value) => {
    const size = Math.abs(value);
    if (size !== 0 && (size < 1e-3 || size >= 1e9)) return value.toExponential(3);
    return value.toLocaleString("en", { maximumFractionDigits: size < 1 ? 6 : size < 1000 ? 4 : 2 });
  };
  const nearest = (points, at) =>
    points.reduce((best, point) => (Math.abs(place(point[0]) - at) < Math.abs(place(best[0]) - at) ? point : best));

  plot.addEventListener("pointermove", (event) => {
    const box = plot.getBoundingClientRect();
    const at = (event.clientX - box.left) / box.width;
    const drawn = series.filter((each) => each.points.length);
    if (!drawn.length || at < -0.02 || at > 1.02) return hide();
    const x = drawn.map((each) => nearest(each.points, at)[0])
      .reduce((best, each) => (Math.abs(place(each) - at) < Math.abs(place(best) - at) ? each : best));
    const here = drawn.map((each) => [each, nearest(each.points, place(x))])
      .filter(([, point]) => Math.abs(place(point[0]) - place(x)) * box.width < 4);
    const heading = document.createElement("strong");
    heading.textContent = labels.length ? labels[x] : text(x);
    tip.replaceChildren(heading, ...here.map(([each, point]) => {
      const line = document.createElement("div");
      for (const part of [each.name, text(point[1])]) line.append(Object.assign(document.createElement("span"), { textContent: part }));
      return line;
    }));
    cursor.hidden = tip.hidden = false;
    cursor.style.left = `${100 * place(x)}%`;
    tip.style.left = place(x) < 0.5 ? `calc(${100 * place(x)}% + .625rem)` : "";
    tip.style.right = place(x) < 0.5 ? "" : `calc(${100 * (1 - place(x))}% + .625rem)`;
  });
  const hide = () => { cursor.hidden = tip.hidden = true; };
  plot.addEventListener("pointerleave", hide);
}
