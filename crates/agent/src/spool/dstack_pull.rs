//! Response to a pull of a dstack server: everything after a millisecond, in whole events only.
//!
//! The contents are decided first (which events, up to which time) and rendered while they are sent, a chunk at a time,
//! so that a large response costs no memory.

use std::{io, sync::Arc};

use axum::body::{Body, Bytes};
use base64::{Engine, engine::general_purpose::STANDARD};
use futures_util::stream;

use windlass_api::agent::runner::JobState;

use super::{
    CHUNK, EVENT_MAX, Reader, Spool, Stream, StreamSource,
    read::{Event, EventRange, Events},
    strip::{self, CodeStripper},
};

/// Limits of one response for each stream.
#[derive(Clone, Copy, Debug)]
pub(super) struct PullBounds {
    pub(super) bytes: u64,
    pub(super) events: usize,
}

pub(super) const PULL_BOUNDS: PullBounds = PullBounds { bytes: 8 * 1024 * 1024, events: 8 * 1024 };

/// Maximum number of bytes returned of an event that is larger than any that a writer creates.
const DAMAGED_EVENT_MAX: u64 = 4 * EVENT_MAX;

/// Contents of one response.
#[derive(Debug, PartialEq)]
pub(super) struct PullPlan {
    pub(super) states: Vec<JobState>,
    pub(super) job: Vec<Event>,
    pub(super) runner: Vec<Event>,
    pub(super) last_updated: i64,
    pub(super) has_more: bool,
}

/// Closes the open events and decides which of them are returned. `states` is called after the horizon is known: a
/// state that is published later has a later time.
pub(super) async fn plan_pull(
    spool: &Spool,
    after: i64,
    bounds: PullBounds,
    states: impl FnOnce() -> Vec<JobState>,
) -> io::Result<PullPlan> {
    let complete = spool.writer(Stream::Job).position().complete;
    close_events(spool).await?;
    let upto = spool.stamps().horizon();
    let mut states = states();
    let ended = states.iter().any(|state| matches!(state.state.as_str(), "done" | "failed" | "terminated"));
    let later = states.iter().any(|state| state.timestamp > upto);
    states.retain(|state| state.timestamp > after && state.timestamp <= upto);
    let wanted = EventRange { after, upto, bytes_max: bounds.bytes, events_max: bounds.events };
    let job = spool.source(Stream::Job).run_blocking(move |reader| reader.events(wanted)).await?;
    let runner = spool.source(Stream::Runner).run_blocking(move |reader| reader.events(wanted)).await?;
    let later = later || job.later;
    let mut plan = merge(after, states, job, runner);
    plan.has_more |= later || !(complete && ended);
    Ok(plan)
}

/// Closes the open events. This waits for a write in progress, which may wait for the disk.
async fn close_events(spool: &Spool) -> io::Result<()> {
    let writers = [spool.writer(Stream::Job).clone(), spool.writer(Stream::Runner).clone()];
    tokio::task::spawn_blocking(move || writers.iter().for_each(super::Writer::close_event))
        .await
        .map_err(io::Error::other)
}

/// Merges the lists. If one list was cut, nothing later may be returned: the cursor would skip what is missing.
fn merge(after: i64, mut states: Vec<JobState>, mut job: Events, mut runner: Events) -> PullPlan {
    let cut = |list: &Events| list.events.last().filter(|_| list.more).map(|last| last.time);
    let cut = [cut(&job), cut(&runner)].into_iter().flatten().min();
    if let Some(cut) = cut {
        states.retain(|state| state.timestamp <= cut);
        job.events.retain(|event| event.time <= cut);
        runner.events.retain(|event| event.time <= cut);
    }
    let last = [
        states.iter().map(|state| state.timestamp).max(),
        job.events.last().map(|event| event.time),
        runner.events.last().map(|event| event.time),
    ];
    let last_updated = last.into_iter().flatten().max().unwrap_or(after);
    PullPlan { states, job: job.events, runner: runner.events, last_updated, has_more: cut.is_some() }
}

/// Renders the plan as JSON. The readers of `spool` are notified when the last response has been sent.
pub(super) fn render_body(spool: &Arc<Spool>, plan: PullPlan, no_connections_secs: i64) -> io::Result<Body> {
    let states = serde_json::to_string(&plan.states)?;
    let head = format!("{{\"job_states\":{states},\"job_logs\":[");
    let tail = format!(
        "],\"last_updated\":{},\"no_connections_secs\":{no_connections_secs},\"has_more\":{}}}",
        plan.last_updated, plan.has_more
    );
    let last = (!plan.has_more).then(|| Arc::clone(spool));
    let parts = vec![
        BodyPart::Last(tail, last),
        BodyPart::Events(EventWriter::new(spool.source(Stream::Runner), plan.runner, false)),
        BodyPart::Text("],\"runner_logs\":[".to_owned()),
        BodyPart::Events(EventWriter::new(spool.source(Stream::Job), plan.job, true)),
        BodyPart::Text(head),
    ];
    Ok(Body::from_stream(stream::try_unfold(parts, next_chunk)))
}

/// Part of the response, in reverse order.
enum BodyPart {
    Text(String),
    Events(EventWriter),
    Last(String, Option<Arc<Spool>>),
}

async fn next_chunk(mut parts: Vec<BodyPart>) -> io::Result<Option<(Bytes, Vec<BodyPart>)>> {
    loop {
        match parts.pop() {
            None => return Ok(None),
            Some(BodyPart::Text(text)) => return Ok(Some((text.into(), parts))),
            Some(BodyPart::Last(text, spool)) => {
                if let Some(spool) = spool {
                    spool.readers().mark_pulled();
                }
                return Ok(Some((text.into(), parts)));
            }
            Some(BodyPart::Events(writing)) if writing.is_done() => {}
            Some(BodyPart::Events(writing)) => {
                let source = writing.source.clone();
                let step = move |reader: &Reader| {
                    let mut writing = writing;
                    let bytes = writing.next_chunk(reader)?;
                    Ok((bytes, writing))
                };
                let (bytes, writing) = source.run_blocking(step).await?;
                parts.push(BodyPart::Events(writing));
                if !bytes.is_empty() {
                    return Ok(Some((bytes.into(), parts)));
                }
            }
        }
    }
}

/// Renders events as elements of a JSON list.
struct EventWriter {
    source: StreamSource,
    events: std::vec::IntoIter<Event>,
    strip: Option<CodeStripper>,
    /// Current offset of the stripper.
    at: Option<u64>,
    first: bool,
}

impl EventWriter {
    fn new(source: &StreamSource, events: Vec<Event>, strip: bool) -> Self {
        let strip = strip.then(CodeStripper::default);
        Self { source: source.clone(), events: events.into_iter(), strip, at: None, first: true }
    }

    fn is_done(&self) -> bool {
        self.events.as_slice().is_empty()
    }

    /// Renders the next events, up to the size of a chunk.
    fn next_chunk(&mut self, reader: &Reader) -> io::Result<Vec<u8>> {
        let mut out = Vec::new();
        while out.len() < CHUNK
            && let Some(event) = self.events.next()
        {
            let message = self.message(reader, event)?;
            if message.is_empty() {
                continue;
            }
            let comma = if std::mem::take(&mut self.first) { "" } else { "," };
            let text = STANDARD.encode(message);
            out.extend_from_slice(
                format!("{comma}{{\"timestamp\":{},\"message\":\"{text}\"}}", event.time).as_bytes(),
            );
        }
        Ok(out)
    }

    fn message(&mut self, reader: &Reader, event: Event) -> io::Result<Vec<u8>> {
        let size = usize::try_from(event.size().min(DAMAGED_EVENT_MAX)).unwrap_or(0);
        let mut bytes = reader.read(event.start, size)?;
        if let Some(strip) = &mut self.strip {
            if self.at != Some(event.start) {
                let from = event.start.saturating_sub(strip::CODE_MAX as u64);
                let before = usize::try_from(event.start - from).unwrap_or(0);
                *strip = CodeStripper::after(&reader.read(from, before)?);
            }
            self.at = Some(event.start + bytes.len() as u64);
            strip.strip(&mut bytes);
        }
        Ok(bytes)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn event(time: i64, start: u64, end: u64) -> Event {
        Event { time, start, end }
    }

    fn state(timestamp: i64) -> JobState {
        JobState {
            state: "running".to_owned(),
            timestamp,
            termination_reason: String::new(),
            termination_message: String::new(),
            detail: None,
            exit_status: None,
        }
    }

    fn times(plan: &PullPlan) -> (Vec<i64>, Vec<i64>, Vec<i64>) {
        (
            plan.states.iter().map(|state| state.timestamp).collect(),
            plan.job.iter().map(|event| event.time).collect(),
            plan.runner.iter().map(|event| event.time).collect(),
        )
    }

    #[test]
    fn o1_a_pull_cut_at_its_limit_returns_nothing_later_than_the_cut() {
        let job = Events { events: vec![event(5, 0, 9), event(8, 9, 20)], more: true, later: false };
        let runner = Events { events: vec![event(6, 0, 1), event(11, 1, 2)], more: false, later: false };
        let plan = merge(4, vec![state(7), state(12)], job, runner);
        assert_eq!(times(&plan), (vec![7], vec![5, 8], vec![6]));
        assert_eq!((plan.last_updated, plan.has_more), (8, true));
    }

    #[test]
    fn without_new_events_the_cursor_does_not_move() {
        let plan = merge(40, Vec::new(), Events::default(), Events::default());
        assert_eq!((plan.last_updated, plan.has_more), (40, false));
    }
}
