//! Writes the output of jobs to stdout.
//!
//! The output of a single job is copied unmodified. With several jobs, complete lines are written, each prefixed with
//! its rank and replica (the suffix of the job name); an incomplete line is buffered.

use std::collections::BTreeMap;

use regex_automata::meta::Regex;
use windlass_model::time::Timestamp;

use crate::output::{
    self, UntrustedWriter, format,
    style::{Colour, Style},
};

/// Maximum length of a buffered line; longer ones are written in parts.
const LINE_MAX: usize = 64 * 1024;
const COLOURS: [Colour; 5] = [Colour::Cyan, Colour::Magenta, Colour::Blue, Colour::Green, Colour::Yellow];

/// Replica and rank.
pub(crate) type JobIndex = (i64, i64);

pub(crate) struct LogPrinter {
    raw: bool,
    /// Prefix lines with their job.
    pub(super) several: bool,
    /// Prefix lines with their time.
    timestamps: bool,
    grep: Option<Regex>,
    /// Prefixes that replace rank and replica.
    pub(super) labels: BTreeMap<JobIndex, String>,
    each: BTreeMap<JobIndex, JobWriter>,
    /// True if the output ends within a line.
    pub(super) mid_line: bool,
}

struct JobWriter {
    prefix: String,
    lines: LineSplitter,
    out: UntrustedWriter,
}

impl LogPrinter {
    /// `raw` passes escape sequences to a terminal. `grep` selects matching lines.
    pub(crate) fn new(raw: bool, several: bool, grep: Option<Regex>) -> Self {
        Self {
            raw,
            several,
            timestamps: false,
            grep,
            labels: BTreeMap::new(),
            each: BTreeMap::new(),
            mid_line: false,
        }
    }

    /// Prefixes each line with the time at which it was written.
    pub(crate) fn with_timestamps(mut self, wanted: bool) -> Self {
        self.timestamps = wanted;
        self
    }

    fn is_by_lines(&self) -> bool {
        self.several || self.timestamps || self.grep.is_some()
    }

    /// Writes output of the given time. Returns false if stdout is closed.
    pub(crate) fn write(&mut self, place: JobIndex, at: Timestamp, bytes: &[u8]) -> bool {
        let (raw, is_by_lines) = (self.raw, self.is_by_lines());
        let label = self.labels.get(&place);
        let name = self.each.entry(place).or_insert_with(|| JobWriter::new(place, label, raw));
        if !is_by_lines {
            self.mid_line = bytes.last().map_or(self.mid_line, |byte| *byte != b'\n');
            return name.out.write(bytes);
        }
        let shown =
            LineFormat { several: self.several, timestamps: self.timestamps, grep: self.grep.as_ref() };
        let JobWriter { prefix, lines, out } = name;
        let mut text = Vec::new();
        lines.add(bytes, at, |line, at| shown.add(&mut text, prefix, line, at));
        // One write for all lines: a write for each would take longer than finding it.
        text.is_empty() || out.write(&text)
    }

    /// Completes the last line of a job, so that a line of another job does not continue it.
    pub(super) fn finish_job(&mut self, place: JobIndex) -> bool {
        let shown =
            LineFormat { several: self.several, timestamps: self.timestamps, grep: self.grep.as_ref() };
        let Some(JobWriter { prefix, lines, out }) = self.each.get_mut(&place) else { return true };
        let mut text = Vec::new();
        lines.end(|line, at| shown.add(&mut text, prefix, line, at));
        text.is_empty() || out.write(&text)
    }

    /// Completes the last line of every job.
    pub(crate) fn end(&mut self) -> bool {
        let places: Vec<JobIndex> = self.each.keys().copied().collect();
        places.into_iter().all(|place| self.finish_job(place))
    }
}

impl JobWriter {
    fn new(place: JobIndex, label: Option<&String>, raw: bool) -> Self {
        let at = usize::try_from(place.0 * 7 + place.1).unwrap_or(0) % COLOURS.len();
        let label =
            label.map_or_else(|| format!("{}-{}", place.1, place.0), |label| output::printable(label));
        let label = format!("{label} |");
        let prefix = format!("{} ", Style::stdout().paint(COLOURS[at], &label));
        Self { prefix, lines: LineSplitter::default(), out: UntrustedWriter::new(raw) }
    }
}

/// Format and filter of lines.
struct LineFormat<'a> {
    several: bool,
    timestamps: bool,
    grep: Option<&'a Regex>,
}

impl LineFormat<'_> {
    fn add(&self, text: &mut Vec<u8>, prefix: &str, line: &[u8], at: Timestamp) {
        // Match without the line break, so that `$` matches before it.
        if self.grep.is_some_and(|grep| !grep.is_match(line.trim_ascii_end())) {
            return;
        }
        if self.timestamps {
            text.extend_from_slice(format::timestamp(at).as_bytes());
            text.push(b' ');
        }
        if self.several {
            text.extend_from_slice(prefix.as_bytes());
        }
        text.extend_from_slice(line);
    }
}

/// Splits bytes into lines.
#[derive(Debug, Default)]
pub(crate) struct LineSplitter {
    half: Vec<u8>,
    /// Time of the incomplete line.
    since: Option<Timestamp>,
}

impl LineSplitter {
    /// Passes each complete line to `give`, with its line break and the time at which it began. Copies only the
    /// incomplete line.
    pub(crate) fn add(&mut self, bytes: &[u8], at: Timestamp, mut give: impl FnMut(&[u8], Timestamp)) {
        let mut rest = bytes;
        while let Some(end) = rest.iter().position(|byte| *byte == b'\n') {
            let (line, after) = rest.split_at(end + 1);
            rest = after;
            if self.half.is_empty() {
                give(line, at);
                continue;
            }
            self.half.extend_from_slice(line);
            give(&self.half, self.since.take().unwrap_or(at));
            self.half.clear();
        }
        if !rest.is_empty() {
            self.since.get_or_insert(at);
            self.half.extend_from_slice(rest);
        }
        if self.half.len() > LINE_MAX {
            self.end(give);
        }
    }

    /// Completes the last line with a line break.
    pub(crate) fn end(&mut self, mut give: impl FnMut(&[u8], Timestamp)) {
        if self.half.is_empty() {
            return;
        }
        self.half.push(b'\n');
        give(&self.half, self.since.take().unwrap_or(Timestamp(0)));
        self.half.clear();
    }
}

#[cfg(test)]
mod tests {
    use windlass_model::time::Timestamp;

    use super::{LINE_MAX, LineFormat, LineSplitter, Regex};

    const AT: Timestamp = Timestamp(1_000_000);

    #[test]
    fn lines_are_reassembled_from_chunks_of_any_size() {
        let text = b"one\ntwo\r\n\nthree";
        for step in 1..text.len() {
            let (mut lines, mut out) = (LineSplitter::default(), Vec::new());
            for part in text.chunks(step) {
                lines.add(part, AT, |line, _| out.push(line.to_vec()));
            }
            lines.end(|line, _| out.push(line.to_vec()));
            let want: [&[u8]; 4] = [b"one\n", b"two\r\n", b"\n", b"three\n"];
            assert_eq!(out, want, "by {step}");
        }
    }

    #[test]
    fn an_overlong_line_is_printed_in_parts() {
        let (mut lines, mut out) = (LineSplitter::default(), Vec::new());
        lines.add(&vec![b'x'; LINE_MAX + 1], AT, |line, _| out.push(line.to_vec()));
        assert_eq!(out, [[vec![b'x'; LINE_MAX + 1], b"\n".to_vec()].concat()]);
        lines.end(|line, _| out.push(line.to_vec()));
        assert_eq!(out.len(), 1);
    }

    #[test]
    fn a_line_is_stamped_with_the_time_of_its_first_byte() {
        let (mut lines, mut text) = (LineSplitter::default(), Vec::new());
        let shown = LineFormat { several: true, timestamps: true, grep: None };
        lines.add(b"a", Timestamp::from_secs(1), |line, at| shown.add(&mut text, "0-1 | ", line, at));
        lines.add(b"b\nc\n", Timestamp::from_secs(3), |line, at| shown.add(&mut text, "0-1 | ", line, at));
        let text = String::from_utf8(text).unwrap();
        assert_eq!(text, "1970-01-01T00:00:01Z 0-1 | ab\n1970-01-01T00:00:03Z 0-1 | c\n");
    }

    /// The cost of a line depends on its length alone, not on the size of the chunk: one million lines take little
    /// time.
    #[test]
    fn a_chunk_of_many_lines_is_split_in_one_pass_without_copying() {
        let piece = b"step 17 of training, loss=0.25\n".repeat(200_000);
        let grep = Regex::new("loss=9").unwrap();
        let shown = LineFormat { several: false, timestamps: false, grep: Some(&grep) };
        let (mut lines, mut text, mut count) = (LineSplitter::default(), Vec::new(), 0);
        lines.add(&piece, AT, |line, at| {
            count += 1;
            shown.add(&mut text, "", line, at);
        });
        assert_eq!((count, text.len(), lines.half.capacity()), (200_000, 0, 0), "nothing is copied");
    }
}
