// Keeps the end of a text that grows in sight, until its reader scrolls away from it.

const NEAR = 40; // pixels from the end that count as being there

export class Follower {
  // box: what scrolls; content: what grows in it; end: a button that leads to the end, shown while
  // the reader is elsewhere.
  constructor(box, content, end) {
    Object.assign(this, { box, end });
    this.following = true;
    this.top = 0;
    box.addEventListener("scroll", () => this.scrolled(), { passive: true });
    // While text comes fast the end may be set again before the scroll is told of.
    box.addEventListener("wheel", ({ deltaY }) => {
      if (deltaY < 0 && box.scrollTop > 0) this.following = false;
      this.tell();
    }, { passive: true });
    end.addEventListener("click", () => this.begin());
    // Told after each layout, whatever has grown: whether the reader was at the end must be known
    // from before, since afterwards the end is somewhere else.
    const sizes = new ResizeObserver(() => this.keep());
    sizes.observe(content);
    sizes.observe(box);
  }

  // From now on the end is followed.
  begin() {
    this.following = true;
    this.keep();
  }

  scrolled() {
    const { scrollTop, scrollHeight, clientHeight } = this.box;
    // Only scrolling down follows the end again: the event of `keep`'s own step may come after the
    // reader's wheel, when the place is still the end.
    if (scrollHeight - scrollTop - clientHeight >= NEAR) {
      if (scrollTop < this.top) this.following = false;
    } else if (scrollTop > this.top) this.following = true;
    this.top = scrollTop;
    this.tell();
  }

  keep() {
    if (this.following) {
      this.box.scrollTop = this.box.scrollHeight;
      this.top = this.box.scrollTop;
    }
    this.tell();
  }

  tell() {
    this.end.hidden = this.following;
  }
}
