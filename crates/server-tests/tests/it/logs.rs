//! Logs on disk: byte-exact after repeats, overlaps and crashes, and searchable by time.

use std::fs::OpenOptions;

use base64::{Engine, engine::general_purpose::STANDARD};
use proptest::prelude::*;
use windlass_api::logs::PollRequest;
use windlass_model::id::{ProjectId, RunId, SubmissionId};
use windlass_server::logs::{
    Log, LogChunk, LogError, LogRange, LogSource, LogStore, files::FileLogStore, page,
};
use windlass_testkit::temp_dir;

pub(crate) fn random_id() -> uuid::Uuid {
    let mut bytes = [0; 16];
    getrandom::fill(&mut bytes).unwrap();
    uuid::Builder::from_random_bytes(bytes).into_uuid()
}

pub(crate) fn new_log() -> Log {
    Log {
        project: ProjectId(random_id()),
        run: RunId(random_id()),
        submission: SubmissionId(random_id()),
        stream: LogSource::Job,
    }
}

pub(crate) const FULL_RANGE: LogRange = LogRange {
    from: None,
    after: None,
    until: None,
    descending: false,
    pieces_max: usize::MAX,
    bytes_max: usize::MAX,
};

pub(crate) fn joined_text(pieces: &[LogChunk]) -> String {
    let bytes: Vec<u8> = pieces.iter().flat_map(|piece| piece.bytes.clone()).collect();
    String::from_utf8_lossy(&bytes).into_owned()
}

#[tokio::test]
async fn o1_a_repeated_append_is_stored_once_and_a_gap_is_refused() {
    let home = temp_dir("logs").unwrap();
    let (files, log) = (FileLogStore::new(home.path().to_owned()), new_log());
    assert_eq!(files.end(&log).await.unwrap(), 0);
    assert_eq!(files.append_to_files(&log, 0, 10, b"hello ").await.unwrap(), 6);
    assert_eq!(files.append_to_files(&log, 0, 11, b"hello ").await.unwrap(), 6);
    assert_eq!(files.append_to_files(&log, 3, 12, b"lo world").await.unwrap(), 11);
    let gap = files.append_to_files(&log, 12, 13, b"!").await.unwrap_err();
    assert!(matches!(gap, LogError::Gap { offset: 12, end: 11 }), "{gap}");
    files.sync(&log).await.unwrap();
    let pieces = files.read(&log, FULL_RANGE).await.unwrap();
    assert_eq!(joined_text(&pieces), "hello world");
    assert_eq!(pieces.iter().map(|piece| (piece.offset, piece.at)).collect::<Vec<_>>(), [(0, 10), (6, 12)]);

    files.remove(log.project, log.run).await.unwrap();
    files.remove(log.project, log.run).await.unwrap();
    assert_eq!(files.end(&log).await.unwrap(), 0);
}

#[tokio::test]
async fn log_ranges_are_read_forward_backward_and_by_time() {
    let home = temp_dir("logs").unwrap();
    let (files, log) = (FileLogStore::new(home.path().to_owned()), new_log());
    for n in 0..10_u64 {
        // The clock of the host jumps back once: times in the log do not.
        let at = if n == 5 { 1 } else { 100 + n.cast_signed() };
        files.append_to_files(&log, n * 2, at, format!("{n};").as_bytes()).await.unwrap();
    }
    let read = async |range| joined_text(&files.read(&log, range).await.unwrap());
    assert_eq!(read(LogRange { pieces_max: 3, ..FULL_RANGE }).await, "0;1;2;");
    assert_eq!(read(LogRange { from: Some(6), pieces_max: 2, ..FULL_RANGE }).await, "3;4;");
    assert_eq!(read(LogRange { descending: true, pieces_max: 2, ..FULL_RANGE }).await, "9;8;");
    assert_eq!(
        read(LogRange { descending: true, from: Some(16), pieces_max: 2, ..FULL_RANGE }).await,
        "7;6;"
    );
    assert_eq!(read(LogRange { after: Some(102), until: Some(104), ..FULL_RANGE }).await, "3;4;5;");
    assert_eq!(read(LogRange { bytes_max: 5, ..FULL_RANGE }).await, "0;1;");
    assert_eq!(read(LogRange { bytes_max: 1, ..FULL_RANGE }).await, "0");
    assert_eq!(read(LogRange { from: Some(3), bytes_max: 4, ..FULL_RANGE }).await, ";2;");
    assert_eq!(read(LogRange { from: Some(7), bytes_max: 0, pieces_max: 1, ..FULL_RANGE }).await, ";");
    assert_eq!(read(LogRange { after: Some(999), ..FULL_RANGE }).await, "");
}

#[tokio::test]
async fn concurrent_log_writers_neither_lose_nor_duplicate_bytes() {
    let home = temp_dir("logs").unwrap();
    let (files, log) = (std::sync::Arc::new(FileLogStore::new(home.path().to_owned())), new_log());
    let whole: Vec<u8> = (0..20_000_u32).flat_map(u32::to_be_bytes).collect();
    let writers: Vec<_> = [7_usize, 64, 1000, 4096]
        .into_iter()
        .map(|step| {
            let (files, whole) = (std::sync::Arc::clone(&files), whole.clone());
            tokio::spawn(async move {
                let mut end = 0_usize;
                while end < whole.len() {
                    let until = (end + step * 16).min(whole.len());
                    end = files.append_to_files(&log, end as u64, 0, &whole[end..until]).await.unwrap()
                        as usize;
                }
            })
        })
        .collect();
    for writer in writers {
        writer.await.unwrap();
    }
    let pieces = files.read(&log, FULL_RANGE).await.unwrap();
    assert!(pieces.iter().flat_map(|piece| &piece.bytes).eq(&whole));
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 64, failure_persistence: None, ..ProptestConfig::default() })]

    /// Whatever a crash leaves of the two files, a writer that continues from the end completes the log.
    #[test]
    fn o1_a_log_truncated_anywhere_can_be_completed(
        pieces in prop::collection::vec(prop::collection::vec(any::<u8>(), 1..40), 1..12),
        cut_bytes in 0.0..1.0_f64,
        cut_index in 0.0..1.0_f64,
        torn in any::<bool>(),
    ) {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
        runtime.block_on(async {
            let home = temp_dir("logs").unwrap();
            let (files, log) = (FileLogStore::new(home.path().to_owned()), new_log());
            let whole: Vec<u8> = pieces.concat();
            let mut end = 0;
            for piece in &pieces {
                end = files.append_to_files(&log, end, 5, piece).await.unwrap();
            }
            let base = home.path().join(log.project.to_string()).join(log.run.to_string());
            let base = base.join(log.submission.to_string());
            for (name, share) in [("job.log", cut_bytes), ("job.idx", cut_index)] {
                let file = OpenOptions::new().write(true).open(base.join(name)).unwrap();
                let len = file.metadata().unwrap().len();
                let kept = (len as f64 * share) as u64;
                file.set_len(kept).unwrap();
                if torn {
                    // A page that was never written reads as zeros.
                    file.set_len(len).unwrap();
                }
            }
            let end = files.end(&log).await.unwrap();
            assert!(end <= whole.len() as u64);
            files.append_to_files(&log, end, 6, &whole[end as usize..]).await.unwrap();
            assert_eq!(files.end(&log).await.unwrap(), whole.len() as u64);
            let read: u64 = files.read(&log, FULL_RANGE).await.unwrap().iter().map(|piece| piece.bytes.len() as u64).sum();
            assert_eq!(read, whole.len() as u64);
        });
    }
}

#[tokio::test]
async fn a_client_pages_through_a_log_in_either_direction() {
    let home = temp_dir("logs").unwrap();
    let (files, log) = (FileLogStore::new(home.path().to_owned()), new_log());
    for n in 0..7_u64 {
        files.append_to_files(&log, n * 2, n.cast_signed(), format!("{n};").as_bytes()).await.unwrap();
    }
    for (descending, expect) in [(false, "0;1;2;3;4;5;6;"), (true, "6;5;4;3;2;1;0;")] {
        let mut requested: PollRequest = serde_json::from_value(serde_json::json!({
            "run_name": "r", "job_submission_id": log.submission, "limit": 3, "descending": descending,
        }))
        .unwrap();
        let (mut message, mut pages) = (String::new(), 0);
        loop {
            let page = page::read_page(&files, &log, page::requested_range(&requested).unwrap(), None)
                .await
                .unwrap();
            for event in page.logs {
                let bytes = STANDARD.decode(event.message).unwrap();
                message.push_str(std::str::from_utf8(&bytes).unwrap());
            }
            pages += 1;
            requested.next_token = page.next_token;
            if requested.next_token.is_none() {
                break;
            }
        }
        assert_eq!((message.as_str(), pages), (expect, 3));
        requested.next_token = Some("elsewhere".into());
        assert_eq!(
            page::requested_range(&requested).unwrap_err().to_string(),
            "invalid `next_token` value `elsewhere`"
        );
    }
}
