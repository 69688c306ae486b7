// Everything in the cells of the notebook in front that is cut, or wider than what it stands in.
// Each cell is scrolled to first: JupyterLab draws lazily.
async () => {
    const notebook = window.jupyterapp.shell.currentWidget.content;
    const found = [], pictures = [];
    // The words of an output that begin in one line and end in another, though a line has room.
    const broken = (output) => {
        const words = [], walker = document.createTreeWalker(output, NodeFilter.SHOW_TEXT);
        const room = output.clientWidth / 12;  // letters; a word beyond that has no choice
        const range = document.createRange();
        for (let node = walker.nextNode(); node; node = walker.nextNode())
            for (const { 0: word, index } of node.data.matchAll(/\w+/g)) {
                if (word.length > room) continue;
                range.setStart(node, index);
                range.setEnd(node, index + word.length);
                if (range.getClientRects().length > 1) words.push(word);
            }
        return words;
    };
    const frame = () => new Promise((done) => requestAnimationFrame(done));
    // Not shown, or meant to scroll or to overlap: JupyterLab's own buttons, text for screen readers.
    const aside = 'mjx-assistive-mml, .jp-Toolbar, .jp-cell-menu, .cm-announced, .cm-layer';
    for (const [index, cell] of notebook.widgets.entries()) {
        if (!cell.node.isConnected) await notebook.scrollToItem(index);
        cell.node.scrollIntoView();
        await cell.ready;
        await frame();
        const right = cell.node.getBoundingClientRect().right + 1;
        const say = (element, what) => found.push(
            `cell ${index}, ${cell.model.type}, ${element.tagName.toLowerCase()}`
            + `.${element.className}: ${what}`);
        for (const element of cell.node.querySelectorAll('*')) {
            if (element.closest(aside)) continue;
            const { width, right: end } = element.getBoundingClientRect();
            const wide = element.scrollWidth - element.clientWidth;
            const clips = getComputedStyle(element).overflowX !== 'visible';
            if (clips && element.clientWidth > 1 && wide > 1) say(element, `${wide} pixels cut`);
            if (width > 1 && end > right && !element.closest('.cm-scroller'))
                say(element, `reaches ${Math.round(end - right)} pixels beyond its cell`);
            if (element.classList.contains('jp-mod-outputsScrolled')) say(element, 'needs scrolling');
        }
        for (const text of cell.node.querySelectorAll('.jp-OutputArea-output pre'))
            for (const word of broken(text)) say(text, `breaks in the middle of "${word}"`);
        for (const image of cell.node.querySelectorAll('.jp-OutputArea img')) {
            await image.decode().catch(() => say(image, 'cannot be decoded'));
            const { width, height } = image.getBoundingClientRect();
            const shape = (image.naturalWidth / image.naturalHeight) / (width / height);
            if (!(Math.abs(shape - 1) < 0.02)) say(image, 'is distorted');
            pictures.push([index, image.naturalWidth, Math.round(width)]);
        }
    }
    return { found, pictures, cells: notebook.widgets.length };
}
