//! Every byte once and in order, by offset and by time.

use std::sync::atomic::{AtomicBool, Ordering};

use axum::body::to_bytes;
use base64::{Engine, engine::general_purpose::STANDARD};
use parking_lot::Mutex;
use proptest::prelude::*;

use windlass_api::agent::runner::{JobState, LogEvent, PullResponse};

use super::*;
use crate::spool::{dstack_pull, write::Error};

proptest! {
    #![proptest_config(ProptestConfig::with_cases(48))]

    #[test]
    fn o1_written_bytes_are_read_back_for_any_chunk_size(
        chunks in proptest::collection::vec((proptest::collection::vec(any::<u8>(), 0..3000), 0i64..30), 0..40),
        piece in 1usize..5000,
    ) {
        let (run, stamps) = (RunDir::new(), Timestamps::manual(1000));
        let (writer, reader) = (run.writer(&stamps), run.reader());
        let (mut written, mut seen) = (Vec::new(), Vec::new());
        for (chunk, pause) in &chunks {
            writer.append(chunk).unwrap();
            written.extend_from_slice(chunk);
            stamps.advance(*pause);
            seen.extend(reader.read(seen.len() as u64, piece).unwrap());
            prop_assert!(written.starts_with(&seen));
        }
        prop_assert_eq!(reader.position().unwrap(), Position { end: written.len() as u64, complete: false });
        writer.finish().unwrap();
        prop_assert_eq!(reader.position().unwrap(), Position { end: written.len() as u64, complete: true });
        prop_assert_eq!(&read_all(&reader, piece), &written);

        let events = reader.events(ALL_EVENTS).unwrap().events;
        prop_assert!(events.windows(2).all(|two| two[0].time < two[1].time && two[0].end == two[1].start));
        prop_assert_eq!(events.iter().map(|event| event.size()).sum::<u64>(), written.len() as u64);
        prop_assert!(events.iter().all(|event| event.size() <= EVENT_MAX));
        for event in &events {
            prop_assert_eq!(reader.offset_at(event.time).unwrap(), event.start);
            prop_assert_eq!(reader.offset_at(event.time + 1).unwrap(), event.end);
        }
        prop_assert_eq!(reader.damage().unwrap(), []);
    }
}

#[derive(Clone, Debug)]
enum Step {
    Write(Stream, usize),
    Pause(i64),
    State,
    /// Pull; with `false` the server fails to store the answer and repeats the request.
    Pull(bool),
}

fn steps() -> impl Strategy<Value = Vec<Step>> {
    let step = prop_oneof![
        6 => (any::<bool>(), 1usize..2000).prop_map(|(job, size)| {
            Step::Write(if job { Stream::Job } else { Stream::Runner }, size)
        }),
        3 => (0i64..25).prop_map(Step::Pause),
        1 => Just(Step::State),
        2 => any::<bool>().prop_map(Step::Pull),
    ];
    proptest::collection::vec(step, 0..80)
}

/// Server whose cursor has millisecond resolution.
#[derive(Default)]
struct TestServer {
    cursor: i64,
    job: Vec<u8>,
    runner: Vec<u8>,
    states: Vec<i64>,
    times: Vec<i64>,
}

impl TestServer {
    fn keep(&mut self, pull: PullResponse) {
        let bytes = |events: &[LogEvent]| -> Vec<u8> {
            events.iter().flat_map(|event| STANDARD.decode(&event.message).unwrap()).collect()
        };
        self.job.extend(bytes(&pull.job_logs));
        self.runner.extend(bytes(&pull.runner_logs));
        self.states.extend(pull.job_states.iter().map(|state| state.timestamp));
        let mut times: Vec<i64> =
            pull.job_logs.iter().chain(&pull.runner_logs).map(|log| log.timestamp).collect();
        times.extend(pull.job_states.iter().map(|state| state.timestamp));
        times.sort_unstable();
        assert!(times.iter().all(|time| *time > self.cursor && *time <= pull.last_updated));
        self.times.extend(times);
        self.cursor = pull.last_updated;
    }
}

fn state(timestamp: i64, word: &str) -> JobState {
    JobState {
        state: word.to_owned(),
        timestamp,
        termination_reason: String::new(),
        termination_message: String::new(),
        detail: None,
        exit_status: None,
    }
}

async fn pull_once(
    spool: &Arc<Spool>,
    after: i64,
    bounds: dstack_pull::PullBounds,
    states: &Mutex<Vec<JobState>>,
) -> PullResponse {
    let plan = dstack_pull::plan_pull(spool, after, bounds, || states.lock().clone()).await.unwrap();
    let body = dstack_pull::render_body(spool, plan, 7).unwrap();
    serde_json::from_slice(&to_bytes(body, usize::MAX).await.unwrap()).unwrap()
}

fn publish_state(stamps: &Arc<Timestamps>, states: &Mutex<Vec<JobState>>, word: &str) -> i64 {
    let issued = stamps.issue();
    states.lock().push(state(issued.at(), word));
    issued.at()
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(48))]

    #[test]
    fn o1_a_millisecond_cursor_neither_skips_nor_repeats_events(
        steps in steps(), bytes in 1u64..4000, events in 1usize..6,
    ) {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
        let outcome: Result<(), TestCaseError> = runtime.block_on(async {
            let (run, stamps) = (RunDir::new(), Timestamps::manual(1000));
            let spool = Spool::open(run.path(), Arc::clone(&stamps)).unwrap();
            let (bounds, states) = (dstack_pull::PullBounds { bytes, events }, Mutex::new(Vec::new()));
            let (mut job, mut runner, mut changed) = (Vec::new(), Vec::new(), Vec::new());
            let mut server = TestServer::default();
            for (number, step) in steps.iter().enumerate() {
                match step {
                    Step::Write(stream, size) => {
                        let bytes = vec![b'a' + (number % 26) as u8; *size];
                        spool.writer(*stream).append(&bytes).unwrap();
                        let kept = if *stream == Stream::Job { &mut job } else { &mut runner };
                        kept.extend(bytes);
                    }
                    Step::Pause(ms) => stamps.advance(*ms),
                    Step::State => changed.push(publish_state(&stamps, &states, "running")),
                    Step::Pull(kept) => {
                        let pull = pull_once(&spool, server.cursor, bounds, &states).await;
                        prop_assert!(pull.has_more);
                        if *kept {
                            server.keep(pull);
                        }
                    }
                }
            }
            spool.writer(Stream::Job).finish().unwrap();
            changed.push(publish_state(&stamps, &states, "done"));
            for _ in 0..10_000 {
                let pull = pull_once(&spool, server.cursor, bounds, &states).await;
                let more = pull.has_more;
                server.keep(pull);
                if !more {
                    break;
                }
            }
            prop_assert!(pull_once(&spool, server.cursor, bounds, &states).await.job_logs.is_empty());
            prop_assert!(server.job == job && server.runner == runner, "bytes differ");
            prop_assert_eq!(server.states, changed);
            prop_assert!(server.times.windows(2).all(|two| two[0] < two[1]));
            spool.readers().all_read(u64::MAX).await;
            Ok(())
        });
        outcome?;
    }
}

/// The same with real threads and a real clock: the cursor must not pass what is published late.
#[tokio::test]
async fn o1_pulls_concurrent_with_writers_lose_nothing() {
    let (run, stamps) = (RunDir::new(), Timestamps::new());
    let spool = Spool::open(run.path(), Arc::clone(&stamps)).unwrap();
    let states = Arc::new(Mutex::new(Vec::new()));
    let left = Arc::new(std::sync::atomic::AtomicUsize::new(3));
    let ended = Arc::new(AtomicBool::new(false));
    let write = |stream: Stream, lines: usize| {
        let (writer, left) = (spool.writer(stream).clone(), Arc::clone(&left));
        std::thread::spawn(move || {
            for line in 0..lines {
                writer.append(format!("{stream:?} {line}\n").as_bytes()).unwrap();
            }
            left.fetch_sub(1, Ordering::SeqCst);
        })
    };
    let threads = [write(Stream::Job, 20_000), write(Stream::Runner, 3_000), {
        let (stamps, states, left) = (Arc::clone(&stamps), Arc::clone(&states), Arc::clone(&left));
        std::thread::spawn(move || {
            for _ in 0..200 {
                publish_state(&stamps, &states, "running");
                std::thread::yield_now();
            }
            left.fetch_sub(1, Ordering::SeqCst);
        })
    }];
    let mut server = TestServer::default();
    let bounds = dstack_pull::PullBounds { bytes: 16 * 1024, events: 50 };
    loop {
        if left.load(Ordering::SeqCst) == 0 && !ended.swap(true, Ordering::SeqCst) {
            spool.writer(Stream::Job).finish().unwrap();
            publish_state(&stamps, &states, "done");
        }
        let pull = pull_once(&spool, server.cursor, bounds, &states).await;
        let more = pull.has_more;
        server.keep(pull);
        if !more {
            break;
        }
    }
    threads.into_iter().for_each(|thread| thread.join().unwrap());
    let lines = |stream: Stream, lines: usize| -> String {
        (0..lines).map(|line| format!("{stream:?} {line}\n")).collect()
    };
    assert!(String::from_utf8(server.job).unwrap() == lines(Stream::Job, 20_000), "job output differs");
    assert!(
        String::from_utf8(server.runner).unwrap() == lines(Stream::Runner, 3_000),
        "runner output differs"
    );
    assert_eq!(server.states.len(), 201);
}

#[tokio::test]
async fn o1_the_cursor_does_not_pass_a_state_that_is_published_late() {
    let (run, stamps) = (RunDir::new(), Timestamps::manual(1000));
    let spool = Spool::open(run.path(), Arc::clone(&stamps)).unwrap();
    let states = Mutex::new(Vec::new());
    let mut server = TestServer::default();
    spool.writer(Stream::Job).append(b"before ").unwrap();
    let issued = stamps.issue();
    spool.writer(Stream::Job).append(b"after").unwrap();
    server.keep(pull_once(&spool, server.cursor, dstack_pull::PULL_BOUNDS, &states).await);
    assert_eq!(server.job, b"before ", "what came after the state waits for it");
    states.lock().push(state(issued.at(), "running"));
    drop(issued);
    server.keep(pull_once(&spool, server.cursor, dstack_pull::PULL_BOUNDS, &states).await);
    assert_eq!((server.job.as_slice(), server.states.len()), (b"before after".as_slice(), 1));
}

#[tokio::test]
async fn terminal_codes_are_stripped_from_pulls_but_not_from_reads_by_offset() {
    let (run, stamps) = (RunDir::new(), Timestamps::manual(1000));
    let spool = Spool::open(run.path(), Arc::clone(&stamps)).unwrap();
    let states = Mutex::new(Vec::new());
    let mut server = TestServer::default();
    for piece in ["one\x1b[", "31", "mred\x1b]0;ti", "tle\x07", "\x1b", "[0m end"] {
        spool.writer(Stream::Job).append(piece.as_bytes()).unwrap();
        server.keep(pull_once(&spool, server.cursor, dstack_pull::PULL_BOUNDS, &states).await);
    }
    assert_eq!(String::from_utf8(server.job).unwrap(), "onered end");
    assert_eq!(read_all(&run.reader(), 100), b"one\x1b[31mred\x1b]0;title\x07\x1b[0m end");
}

#[test]
fn o6_the_log_quota_is_exact_and_stays_exceeded() {
    let (run, stamps) = (RunDir::new(), Timestamps::manual(1000));
    let writer = run.writer(&stamps);
    writer.limit(Some(10));
    writer.append(b"0123456").unwrap();
    writer.append(b"789").unwrap();
    let Err(Error::QuotaExceeded { per_hour: 10, kept: 0 }) = writer.append(b"x") else { panic!("over") };
    assert_eq!(read_all(&run.reader(), 100), b"0123456789");
    stamps.advance(2 * 3_600_000);
    assert!(
        matches!(writer.append(b"later"), Err(Error::QuotaExceeded { kept: 0, .. })),
        "it stays exceeded"
    );
}

#[test]
fn o6_a_new_hour_has_a_new_quota() {
    let (run, stamps) = (RunDir::new(), Timestamps::manual(1000));
    let writer = run.writer(&stamps);
    writer.limit(Some(10));
    writer.append(b"0123456789").unwrap();
    stamps.advance(3_600_000);
    writer.append(b"abcdefgh").unwrap();
    let Err(Error::QuotaExceeded { kept: 2, .. }) = writer.append(b"ijkl") else { panic!("over") };
    assert_eq!(read_all(&run.reader(), 100), b"0123456789abcdefghij");
    writer.finish().unwrap();
    assert!(run.reader().is_complete().unwrap());
}

#[test]
fn a_complete_stream_rejects_writes_even_when_reopened() {
    let (run, stamps) = (RunDir::new(), Timestamps::manual(1000));
    let writer = run.writer(&stamps);
    writer.append(b"all").unwrap();
    writer.finish().unwrap();
    writer.finish().unwrap();
    assert!(matches!(writer.append(b"more"), Err(Error::Complete)));
    assert!(matches!(run.writer(&stamps).append(b"more"), Err(Error::Complete)));
    assert_eq!(read_all(&run.reader(), 100), b"all");
}
