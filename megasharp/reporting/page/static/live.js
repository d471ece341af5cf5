// A served page asks for news, with the token of its own address; what is chosen on it stays as it is, and so does the place that is read.
"use strict";

const EVERY_MS = 2000;

function sayLive(text) {
  document.getElementById("live").textContent = text;
}

let held = false;
window.addEventListener("pointerdown", () => { held = true; });
for (const end of ["pointerup", "pointercancel"]) window.addEventListener(end, () => { held = false; });

// A list that is open, words that are being typed below, or a drag over a chart would be lost. The bar is not drawn anew.
function busy() {
  const field = document.activeElement;
  return held || (field !== null && field.id !== "query" && ["SELECT", "INPUT"].includes(field.tagName) && field.type !== "checkbox");
}

async function ask(tag) {
  if (busy()) return setTimeout(() => ask(tag), EVERY_MS);
  try {
    const answer = await fetch(`data.json${location.search}`, { headers: tag ? { "If-None-Match": tag } : {}, cache: "no-store" });
    if (answer.status === 200) {
      const height = window.scrollY;
      data = await answer.json();
      draw();
      window.scrollTo(0, height);
      tag = answer.headers.get("ETag");
    }
    sayLive(answer.ok || answer.status === 304 ? `live, ${data.made.slice(11)}` : `not refreshed: ${await answer.text()}`);
  } catch {
    sayLive("the server has ended");
  }
  return setTimeout(() => ask(tag), EVERY_MS);
}

if (data.live) ask(null);
