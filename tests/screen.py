"""A terminal of a few commands, to see what a person would see after all that was written to it."""

import re

_TOKEN = re.compile(r"\x1b\[(\d*)([A-Za-z])|\x1b\[[0-9;?]*[A-Za-z]|\r|\n|[^\x1b\r\n]+")


class Screen:
    """Keeps all rows, as a terminal that scrolls without end would; long lines go on in the next row."""

    def __init__(self, columns=100):
        self.columns = columns
        self._rows = [""]
        self._row = self._column = 0
        self.frames = []
        """The rows before each time that something was taken off."""

    def write(self, text):
        for match in _TOKEN.finditer(text):
            token = match.group()
            if token == "\r":
                self._column = 0
            elif token == "\n":
                self._go_down()
                self._column = 0
            elif match.group(2) == "A":
                self._row -= int(match.group(1) or 1)
                assert self._row >= 0, "above the first row"
            elif match.group(2) == "J":
                self.frames.append(self.rows)
                self._rows[self._row :] = [self._rows[self._row][: self._column]]
            elif not token.startswith("\x1b"):
                for character in token:
                    self._put(character)
        return len(text)

    def flush(self):
        pass

    @property
    def rows(self):
        """All that is to be seen, without what is empty at the end."""
        rows = [row.rstrip() for row in self._rows]
        while rows and not rows[-1]:
            rows.pop()
        return rows

    @property
    def cursor(self):
        return self._row, self._column

    def resize(self, columns):
        """Become narrower or wider: lines that do not fit any more go on in the next row."""
        rows = []
        for number, row in enumerate(self._rows):
            if number == self._row:
                self._row = len(rows)
            rows += [row[start : start + columns] for start in range(0, len(row), columns)] or [""]
        self._rows, self.columns = rows, columns

    def _put(self, character):
        if self._column == self.columns:
            self._go_down()
            self._column = 0
        row = self._rows[self._row].ljust(self._column)
        self._rows[self._row] = row[: self._column] + character + row[self._column + 1 :]
        self._column += 1

    def _go_down(self):
        self._row += 1
        if self._row == len(self._rows):
            self._rows.append("")
