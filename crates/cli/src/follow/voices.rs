//! What jobs wrote, on its way to stdout.
//!
//! One job alone is copied as it is. With several, whole lines are, each with the rank and replica it comes from in
//! front, as the name of the job ends; half a line waits for its other half.

use std::collections::BTreeMap;

use regex_automata::meta::Regex;

use crate::output::{
    self, Foreign,
    style::{Colour, Style},
};

/// Longer lines are shown in parts.
const LINE_MAX: usize = 64 * 1024;
const COLOURS: [Colour; 5] = [Colour::Cyan, Colour::Magenta, Colour::Blue, Colour::Green, Colour::Yellow];

/// Replica and rank.
pub(crate) type Place = (i64, i64);

pub(crate) struct Voices {
    raw: bool,
    /// Lines say whom they are from.
    pub(super) several: bool,
    grep: Option<Regex>,
    each: BTreeMap<Place, Voice>,
    /// Ends with half a line.
    pub(super) mid_line: bool,
}

struct Voice {
    prefix: String,
    lines: Lines,
    out: Foreign,
}

impl Voices {
    /// With `raw`, a terminal is driven by what it shows. With `grep`, only lines that match are shown.
    pub(crate) fn new(raw: bool, several: bool, grep: Option<Regex>) -> Self {
        Self { raw, several, grep, each: BTreeMap::new(), mid_line: false }
    }

    /// False when nobody reads it.
    pub(crate) fn write(&mut self, place: Place, bytes: &[u8]) -> bool {
        let raw = self.raw;
        let voice = self.each.entry(place).or_insert_with(|| Voice::new(place, raw));
        if self.several || self.grep.is_some() {
            let (several, grep) = (self.several, self.grep.as_ref());
            return voice
                .lines
                .add(bytes)
                .iter()
                .all(|line| voice.out.line(&voice.prefix, several, grep, line));
        }
        self.mid_line = bytes.last().map_or(self.mid_line, |byte| *byte != b'\n');
        voice.out.write(bytes)
    }

    /// What a job wrote last may have no line end; the next line of another must not follow on it.
    pub(super) fn end_of(&mut self, place: Place) -> bool {
        let (several, grep) = (self.several, self.grep.as_ref());
        let Some(voice) = self.each.get_mut(&place) else { return true };
        voice.lines.end().is_none_or(|line| voice.out.line(&voice.prefix, several, grep, &line))
    }

    /// The same for all of them.
    pub(crate) fn end(&mut self) -> bool {
        let places: Vec<Place> = self.each.keys().copied().collect();
        places.into_iter().all(|place| self.end_of(place))
    }
}

impl Voice {
    fn new(place: Place, raw: bool) -> Self {
        let at = usize::try_from(place.0 * 7 + place.1).unwrap_or(0) % COLOURS.len();
        let label = format!("{}-{} |", place.1, place.0);
        let prefix = format!("{} ", Style::stdout().paint(COLOURS[at], &label));
        Self { prefix, lines: Lines::default(), out: Foreign::new(raw) }
    }
}

impl Foreign {
    /// A whole line, if it is wanted.
    fn line(&mut self, prefix: &str, several: bool, grep: Option<&Regex>, line: &[u8]) -> bool {
        // What ends a line is no part of it: `$` is before it.
        if grep.is_some_and(|grep| !grep.is_match(line.trim_ascii_end())) {
            return true;
        }
        (!several || output::raw(prefix.as_bytes())) && self.write(line)
    }
}

/// Bytes that become whole lines.
#[derive(Debug, Default)]
pub(crate) struct Lines {
    half: Vec<u8>,
}

impl Lines {
    /// The lines that are whole now.
    pub(crate) fn add(&mut self, bytes: &[u8]) -> Vec<Vec<u8>> {
        self.half.extend_from_slice(bytes);
        let mut whole = Vec::new();
        while let Some(end) = self.half.iter().position(|byte| *byte == b'\n') {
            whole.push(self.half.drain(..=end).collect());
        }
        if self.half.len() > LINE_MAX {
            whole.extend(self.end());
        }
        whole
    }

    /// What has no line end gets one.
    pub(crate) fn end(&mut self) -> Option<Vec<u8>> {
        let mut line = std::mem::take(&mut self.half);
        line.push(b'\n');
        (line.len() > 1).then_some(line)
    }
}

#[cfg(test)]
mod tests {
    use super::{LINE_MAX, Lines};

    #[test]
    fn lines_are_whole_however_they_come() {
        let text = b"one\ntwo\r\n\nthree";
        for step in 1..text.len() {
            let (mut lines, mut out) = (Lines::default(), Vec::new());
            for part in text.chunks(step) {
                out.extend(lines.add(part));
            }
            out.extend(lines.end());
            let want: [&[u8]; 4] = [b"one\n", b"two\r\n", b"\n", b"three\n"];
            assert_eq!(out, want, "by {step}");
        }
    }

    #[test]
    fn a_line_without_end_is_shown_in_parts() {
        let mut lines = Lines::default();
        assert_eq!(
            lines.add(&vec![b'x'; LINE_MAX + 1]),
            [[vec![b'x'; LINE_MAX + 1], b"\n".to_vec()].concat()]
        );
        assert_eq!(lines.end(), None);
    }
}
