//! Bytes of a log by offset, the search in it, and the times of its offsets.

use std::{borrow::Cow, collections::VecDeque, ops::Range};

use axum::body::Body;
use bytes::Bytes;
use futures_util::{StreamExt as _, stream};
use regex_automata::{meta::Regex, util::syntax};
use windlass_api::logs as wire;
use windlass_model::{terminal_codes::CodeStripper, time::Timestamp};

use super::{SseEvent, SseStream, observability::find_log};
use crate::{
    app::App,
    auth::ProjectScope,
    db::jobs,
    error::{Error, Result},
    logs::{Log, LogChunk, LogRange, LogStore as _},
};

const READ_BYTES_MAX: u64 = 1 << 20;
const READ_BYTES_DEFAULT: u64 = 128 * 1024;
/// Bytes that are read at once for a download and for a search.
const STEP_BYTES: usize = 512 * 1024;
/// Longer lines are searched in parts.
const LINE_BYTES_MAX: usize = 1 << 20;
/// Longer lines are cut in the results of a search.
const SHOWN_CHARS_MAX: usize = 2000;
const HITS_MAX: u32 = 10_000;
const HITS_DEFAULT: u32 = 1000;
const CONTEXT_MAX: u32 = 10;
const PATTERN_BYTES_MAX: usize = 1000;
const REGEX_BYTES_MAX: usize = 1 << 20;
const MARKS_MAX: u64 = 200;
const ESCAPE: u8 = 0x1b;

/// A log, open for reading by offset.
#[derive(Clone)]
struct OpenLog {
    app: App,
    log: Log,
    size: u64,
}

impl OpenLog {
    async fn open(
        app: &App,
        scope: &ProjectScope,
        (submission, run_name, diagnose): (uuid::Uuid, &str, bool),
    ) -> Result<Self> {
        let log = find_log(app, scope, submission, run_name, diagnose).await?;
        let size = app.logs().end(&log).await?;
        Ok(Self { app: app.clone(), log, size })
    }

    /// Pieces from an offset, with values of secrets masked.
    async fn read(&self, offset: u64, bytes_max: usize) -> Result<Vec<LogChunk>> {
        let range = LogRange {
            from: Some(offset),
            after: None,
            until: None,
            descending: false,
            pieces_max: usize::MAX,
            bytes_max,
        };
        let store = self.app.logs();
        let pieces = match self.app.masks().of(&self.log).await? {
            Some(mask) => {
                let mut masked = mask.read(store.as_ref(), &self.log, range).await?;
                masked.hide();
                masked.pieces
            }
            None => store.read(&self.log, range).await?,
        };
        Ok(pieces)
    }
}

/// Part of a log, or all of it as a stream.
pub(crate) struct RawLog {
    pub(crate) size: u64,
    pub(crate) body: Body,
    /// Name of the file, for a download.
    pub(crate) file_name: Option<String>,
}

pub(crate) async fn read_raw(app: &App, scope: &ProjectScope, requested: wire::RawRequest) -> Result<RawLog> {
    let wire::RawRequest { run_name, job_submission_id, offset, limit, diagnose, download } = requested;
    let log = OpenLog::open(app, scope, (job_submission_id, &run_name, diagnose)).await?;
    let size = log.size;
    if download == Some(1) {
        let pieces = stream::try_unfold((log, offset), |(log, offset)| async move {
            let pieces = log.read(offset, STEP_BYTES).await.map_err(std::io::Error::other)?;
            let Some(end) = pieces.last().map(LogChunk::end) else { return Ok(None) };
            let bytes: Vec<u8> = pieces.into_iter().flat_map(|piece| piece.bytes).collect();
            Ok::<_, std::io::Error>(Some((Bytes::from(bytes), (log, end))))
        });
        let file_name = Some(format!("{run_name}.log"));
        return Ok(RawLog { size, body: Body::from_stream(pieces), file_name });
    }
    let limit = limit.unwrap_or(READ_BYTES_DEFAULT);
    if limit > READ_BYTES_MAX {
        return Err(Error::refused(format!("`limit` must be from 0 to {READ_BYTES_MAX}")));
    }
    let limit = usize::try_from(limit).unwrap_or(0);
    let pieces = if limit == 0 || offset >= size { Vec::new() } else { log.read(offset, limit).await? };
    let mut bytes: Vec<u8> = pieces.into_iter().flat_map(|piece| piece.bytes).collect();
    bytes.truncate(limit);
    Ok(RawLog { size, body: Body::from(bytes), file_name: None })
}

/// Offsets with their times, evenly distributed over the log.
pub(crate) async fn marks(
    app: &App,
    scope: &ProjectScope,
    requested: wire::MarksRequest,
) -> Result<wire::LogMarks> {
    let wire::MarksRequest { run_name, job_submission_id, diagnose } = requested;
    let log = OpenLog::open(app, scope, (job_submission_id, &run_name, diagnose)).await?;
    let step = (log.size / MARKS_MAX).max(1);
    let mut marks: Vec<(u64, Timestamp)> = Vec::new();
    let mut offset = 0;
    while offset < log.size {
        let Some(piece) = log.read(offset, 1).await?.into_iter().next() else { break };
        if marks.last().is_none_or(|(_, at)| at.0 != piece.at) {
            marks.push((piece.offset, Timestamp(piece.at)));
        }
        offset = offset.saturating_add(step);
    }
    let job = jobs::find(app.db(), log.log.submission).await?;
    let position = |at: Timestamp| {
        marks.iter().take_while(|(_, time)| *time <= at).last().map_or(0, |(offset, _)| *offset)
    };
    let mut events = Vec::new();
    if let Some(job) = job {
        let started = job.running_at.map(|at| (at, "job started"));
        let ended = job.finished_at.map(|at| (at, "job ended"));
        for (at, message) in [started, ended].into_iter().flatten() {
            events.push(wire::LogMarkEvent { at, offset: position(at), message: message.to_owned() });
        }
    }
    Ok(wire::LogMarks { size: log.size, first: 0, marks, events })
}

/// State of a search.
struct LogScan {
    log: OpenLog,
    pattern: Regex,
    offset: u64,
    /// Start of a line whose end has not been read, with its offset and time.
    partial: Vec<u8>,
    partial_at: (u64, i64),
    context: usize,
    /// Last lines, for the context of the next hit.
    before: VecDeque<String>,
    /// Hits whose following lines are not complete.
    open: VecDeque<wire::SearchEvent>,
    ready: VecDeque<wire::SearchEvent>,
    hits: u32,
    hits_max: u32,
    is_over: bool,
}

pub(crate) async fn search(
    app: &App,
    scope: &ProjectScope,
    requested: wire::SearchRequest,
) -> Result<SseStream<wire::SearchEvent>> {
    let pattern = compile(&requested)?;
    let hits_max = requested.limit.unwrap_or(HITS_DEFAULT);
    if hits_max > HITS_MAX {
        return Err(Error::refused(format!("`limit` must be from 0 to {HITS_MAX}")));
    }
    let identity = (requested.job_submission_id, requested.run_name.as_str(), requested.diagnose);
    let log = OpenLog::open(app, scope, identity).await?;
    let scan = LogScan {
        log,
        pattern,
        offset: requested.from,
        partial: Vec::new(),
        partial_at: (requested.from, 0),
        context: requested.context.unwrap_or(0).min(CONTEXT_MAX) as usize,
        before: VecDeque::new(),
        open: VecDeque::new(),
        ready: VecDeque::new(),
        hits: 0,
        hits_max,
        is_over: false,
    };
    let events = stream::unfold(Some(scan), |scan| async move {
        let mut scan = scan?;
        let event = scan.next().await?;
        let is_end = matches!(event, wire::SearchEvent::End { .. });
        let item = SseEvent::Event { id: scan.offset, name: event.name(), data: event };
        Some((item, (!is_end).then_some(scan)))
    });
    Ok(events.boxed())
}

/// Compiles the text or expression. Expressions are searched in linear time.
fn compile(requested: &wire::SearchRequest) -> Result<Regex> {
    if requested.q.is_empty() || requested.q.len() > PATTERN_BYTES_MAX {
        return Err(Error::refused(format!("`q` must have from 1 to {PATTERN_BYTES_MAX} bytes")));
    }
    let text = if requested.regex { requested.q.clone() } else { escape(&requested.q) };
    Regex::builder()
        .syntax(syntax::Config::new().case_insensitive(requested.ignore_case).utf8(false))
        .configure(Regex::config().utf8_empty(false).nfa_size_limit(Some(REGEX_BYTES_MAX)))
        .build(&text)
        .map_err(|error| {
            let detail = error.syntax_error().map_or_else(|| error.to_string(), ToString::to_string);
            Error::refused(format!("invalid expression: {detail}"))
        })
}

fn escape(text: &str) -> String {
    let mut escaped = String::with_capacity(text.len());
    for letter in text.chars() {
        if letter.is_ascii_punctuation() {
            escaped.push('\\');
        }
        escaped.push(letter);
    }
    escaped
}

impl LogScan {
    async fn next(&mut self) -> Option<wire::SearchEvent> {
        loop {
            if let Some(event) = self.ready.pop_front() {
                return Some(event);
            }
            if self.is_over {
                self.ready.extend(self.open.drain(..));
                if let Some(event) = self.ready.pop_front() {
                    return Some(event);
                }
                return Some(wire::SearchEvent::End { hits: self.hits, more: self.hits >= self.hits_max });
            }
            // A log that cannot be read ends the stream without an end, and the client tries again.
            let pieces = self.log.read(self.offset, STEP_BYTES).await.ok()?;
            let is_end = pieces.is_empty() || self.offset >= self.log.size;
            for piece in pieces {
                self.offset = piece.end();
                self.scan(&piece);
            }
            if is_end {
                self.finish_line();
                self.is_over = true;
            }
            let (scanned, size) = (self.offset.min(self.log.size), self.log.size);
            self.ready.push_back(wire::SearchEvent::Progress { scanned, size });
        }
    }

    fn scan(&mut self, piece: &LogChunk) {
        let mut offset = piece.offset;
        for part in piece.bytes.split_inclusive(|byte| *byte == b'\n') {
            if self.is_over {
                return;
            }
            if self.partial.is_empty() {
                self.partial_at = (offset, piece.at);
            }
            self.partial.extend_from_slice(part);
            offset += part.len() as u64;
            if part.ends_with(b"\n") || self.partial.len() >= LINE_BYTES_MAX {
                self.finish_line();
            }
        }
    }

    /// Searches the complete line.
    fn finish_line(&mut self) {
        let line = std::mem::take(&mut self.partial);
        if line.is_empty() || self.is_over {
            return;
        }
        let (start, at) = self.partial_at;
        let content = line.strip_suffix(b"\n").unwrap_or(&line);
        let visible = VisibleText::new(content);
        let text = show(&visible.bytes);
        self.add_context(&text);
        for found in self.pattern.find_iter(&*visible.bytes) {
            let found = visible.range_of(found.range());
            self.hits += 1;
            self.open.push_back(wire::SearchEvent::Hit {
                offset: start + found.start as u64,
                length: found.len() as u64,
                line: start,
                timestamp: Timestamp(at),
                text: text.clone(),
                before: self.before.iter().cloned().collect(),
                after: Vec::new(),
            });
            if self.hits >= self.hits_max {
                self.is_over = true;
                break;
            }
        }
        if self.context == 0 {
            self.ready.extend(self.open.drain(..));
        } else {
            self.before.push_back(text);
            if self.before.len() > self.context {
                self.before.pop_front();
            }
        }
    }

    /// Adds a line to the hits before it, and releases those that are complete.
    fn add_context(&mut self, line: &str) {
        let context = self.context;
        for event in &mut self.open {
            if let wire::SearchEvent::Hit { after, .. } = event {
                after.push(line.to_owned());
            }
        }
        let is_complete = |event: &wire::SearchEvent| matches!(event, wire::SearchEvent::Hit { after, .. } if after.len() >= context);
        while self.open.front().is_some_and(is_complete) {
            self.ready.extend(self.open.pop_front());
        }
    }
}

/// The visible bytes of a line: terminal codes inside a word do not hide it from a search.
struct VisibleText<'a> {
    bytes: Cow<'a, [u8]>,
    /// Position in the line of each visible byte; empty if all are visible.
    positions: Vec<usize>,
}

impl<'a> VisibleText<'a> {
    fn new(line: &'a [u8]) -> Self {
        if !line.contains(&ESCAPE) {
            return Self { bytes: Cow::Borrowed(line), positions: Vec::new() };
        }
        let mut stripper = CodeStripper::default();
        let mut is_visible = |byte: u8| {
            let mut one = vec![byte];
            stripper.strip(&mut one);
            !one.is_empty()
        };
        let positions: Vec<usize> = (0..line.len()).filter(|at| is_visible(line[*at])).collect();
        Self { bytes: positions.iter().map(|at| line[*at]).collect::<Vec<_>>().into(), positions }
    }

    /// Bytes of the line between the first and the last visible byte of a range.
    fn range_of(&self, visible: Range<usize>) -> Range<usize> {
        if self.positions.is_empty() {
            return visible;
        }
        let position = |at: usize| self.positions.get(at).copied();
        let end =
            visible.end.checked_sub(1).filter(|_| !visible.is_empty()).and_then(position).map(|at| at + 1);
        let start = position(visible.start).or_else(|| self.positions.last().map(|at| at + 1)).unwrap_or(0);
        start..end.unwrap_or(start)
    }
}

/// A line without terminal codes as text.
fn show(visible: &[u8]) -> String {
    String::from_utf8_lossy(visible).trim_end_matches('\r').chars().take(SHOWN_CHARS_MAX).collect()
}

#[cfg(test)]
mod tests {
    use super::{VisibleText, show};

    #[test]
    fn a_text_is_found_across_terminal_codes_at_its_place_in_the_line() {
        let line = b"\x1b[32mcheck\x1b[1mpoint\x1b[0m step";
        let visible = VisibleText::new(line);
        assert_eq!(show(&visible.bytes), "checkpoint step");
        let found = visible.range_of(0..10);
        assert_eq!(&line[found], b"check\x1b[1mpoint");
        assert_eq!(&line[visible.range_of(11..15)], b"step");
        assert_eq!(visible.range_of(3..3), 8..8);
        assert_eq!(visible.range_of(15..15), line.len()..line.len());
    }

    #[test]
    fn a_line_without_codes_is_searched_as_it_is() {
        let visible = VisibleText::new(b"plain text");
        assert_eq!(visible.range_of(6..10), 6..10);
        let codes = VisibleText::new(b"\x1b[31m\x1b[0m");
        assert_eq!((codes.bytes.len(), codes.range_of(0..0)), (0, 0..0));
    }
}
