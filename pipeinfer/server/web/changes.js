// What happened to the stages while the job ran, in words.

// One change of the server's facts. stages: those of before it, where they are known.
export function described(change, stages = []) {
  const to = change.when;
  const from = to - change.seconds;
  const pause = `${change.seconds.toFixed(1)} s`;
  if (!change.lost.length) {
    return { from, to, lost: false, pause, text: `layers moved, ${pause}`,
      title: "Layers have moved", long: sentence(change.why) };
  }
  const ranks = change.lost.map((rank) => {
    const held = stages.filter((stage) => stage.rank === rank);
    const what = held.map((stage) => `stage ${stage.stage} on ${stage.host || "its host"}`);
    return `rank ${rank}${what.length ? ` (${what.join(", ")})` : ""}`;
  });
  const who = ranks.join(" and ");
  return {
    from, to, lost: true, pause, who: `rank ${change.lost.join(", ")}`,
    text: `rank ${change.lost.join(", ")} lost, ${pause}`,
    title: `${who[0].toUpperCase()}${who.slice(1)} was lost`,
    long: `The other ranks took over its layers within ${pause} (${layers(change.moved)} moved). `
      + "Answers go on from their last token; no token is lost.",
  };
}

// The whole job has gone, and the server waits for the next one. planned: nothing has failed.
export function away({ reason, planned }) {
  if (planned) {
    return { lost: false, title: "The cluster starts again",
      long: `${sentence(reason)} Answers wait, and go on from their last token.` };
  }
  return { lost: true, who: "the cluster", title: "The cluster has failed",
    long: `${sentence(reason)} It is started again; answers go on from their last token.` };
}

function layers(count) {
  return `${count} layer${count === 1 ? "" : "s"}`;
}

function sentence(text) {
  return text ? `${text[0].toUpperCase()}${text.slice(1)}.` : "";
}
