//! A job that owns its spool's files can falsify its own output and do nothing else.

use std::{fs, os::unix::fs::symlink, time::Duration};

use proptest::prelude::*;

use super::*;
use crate::spool::{
    index::{IndexRecord, IndexRecordKind},
    read::{EventRange, READ_MAX},
};

fn check_all_reads(reader: &Reader, offset: u64, time: i64) -> Result<(), TestCaseError> {
    let end = reader.end().unwrap();
    let bytes = reader.read(offset, usize::MAX).unwrap();
    prop_assert!(bytes.len() as u64 <= end.saturating_sub(offset) && bytes.len() <= READ_MAX);
    prop_assert!(reader.offset_at(time).unwrap() <= end);
    let _ = (reader.is_complete().unwrap(), reader.damage().unwrap());
    for wanted in
        [ALL_EVENTS, EventRange { after: time, upto: time.saturating_add(9), bytes_max: 10, events_max: 3 }]
    {
        let found = reader.events(wanted).unwrap();
        prop_assert!(found.events.len() <= wanted.events_max);
        for event in &found.events {
            prop_assert!(event.start < event.end && event.end <= end);
            prop_assert!(event.time > wanted.after && event.time <= wanted.upto);
        }
    }
    Ok(())
}

fn record() -> impl Strategy<Value = Vec<u8>> {
    let near = prop_oneof![0u64..5000, any::<u64>()];
    let time = prop_oneof![-5i64..50, any::<i64>()];
    prop_oneof![
        4 => (near, time, any::<Option<u32>>(), any::<bool>()).prop_map(|(offset, time, before, complete)| {
            let kind = if complete { IndexRecordKind::Complete } else { IndexRecordKind::Event };
            IndexRecord { offset, time, before, kind }.encode().to_vec()
        }),
        1 => proptest::collection::vec(any::<u8>(), 1..70),
    ]
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(200))]

    #[test]
    fn any_index_with_any_log_is_read_without_failure(
        records in proptest::collection::vec(record(), 0..40),
        log in proptest::collection::vec(any::<u8>(), 0..5000),
        offset in prop_oneof![0u64..6000, any::<u64>()],
        time in prop_oneof![-5i64..50, any::<i64>()],
    ) {
        let run = RunDir::new();
        fs::write(run.file("job.idx"), records.concat()).unwrap();
        fs::write(run.file("job.log"), &log).unwrap();
        let reader = run.reader();
        check_all_reads(&reader, offset, time)?;
        prop_assert_eq!(&read_all(&reader, 777), &log);
        // The file shrinks while the reader has it open.
        fs::OpenOptions::new().write(true).open(run.file("job.log")).unwrap().set_len(log.len() as u64 / 2).unwrap();
        check_all_reads(&reader, offset, time)?;
        // A writer that opens it still starts.
        let writer = run.writer(&Timestamps::manual(1));
        prop_assert!(writer.position().complete || writer.append(b"x").is_ok());
    }
}

#[test]
fn symlinks_pipes_and_devices_in_place_of_the_log_are_refused() {
    let run = RunDir::new();
    let secret = run.file("secret");
    fs::write(&secret, "of the host").unwrap();
    let log = run.file("job.log");
    let refused = |what: &str| {
        let kind = run.reader().read(0, 100).unwrap_err().kind();
        assert_eq!(kind, std::io::ErrorKind::InvalidInput, "{what}");
        assert!(
            Writer::open(&DirHandle::open(run.path()).unwrap(), Stream::Job, Timestamps::manual(1)).is_err(),
            "{what}"
        );
        if fs::remove_file(&log).is_err() {
            fs::remove_dir(&log).unwrap();
        }
    };
    symlink(&secret, &log).unwrap();
    refused("a link");
    symlink("/nowhere", &log).unwrap();
    refused("a link to nothing");
    rustix::fs::mkfifoat(rustix::fs::CWD, &log, rustix::fs::Mode::RUSR).unwrap();
    refused("a pipe");
    fs::create_dir(&log).unwrap();
    refused("a directory");
    let device = rustix::fs::makedev(1, 5);
    let kind = rustix::fs::FileType::CharacterDevice;
    rustix::fs::mknodat(rustix::fs::CWD, &log, kind, rustix::fs::Mode::RUSR, device).unwrap();
    refused("a device");
    assert_eq!(fs::read(&secret).unwrap(), b"of the host");
}

#[test]
fn a_pipe_in_place_of_the_index_loses_times_but_no_bytes() {
    let run = RunDir::new();
    fs::write(run.file("job.log"), "output").unwrap();
    rustix::fs::mkfifoat(rustix::fs::CWD, run.file("job.idx"), rustix::fs::Mode::RUSR).unwrap();
    assert_eq!(read_all(&run.reader(), 100), b"output");
    assert_eq!(run.reader().events(ALL_EVENTS).unwrap().events.len(), 1);
}

#[test]
fn huge_sparse_files_are_read_cheaply() {
    let run = RunDir::new();
    for name in ["job.log", "job.idx"] {
        fs::File::create(run.file(name)).unwrap().set_len(1 << 40).unwrap();
    }
    let reader = run.reader();
    assert_eq!(reader.read((1 << 40) - 3, usize::MAX).unwrap(), [0; 3]);
    assert!(reader.read(u64::MAX, 5).unwrap().is_empty());
    assert!(!reader.is_complete().unwrap());
    assert!(reader.offset_at(5).unwrap() <= 1 << 40);
    let some = EventRange { after: 5, upto: 9, bytes_max: 100, events_max: 10 };
    assert_eq!(reader.events(some).unwrap().events, []);
    fs::OpenOptions::new().write(true).open(run.file("job.log")).unwrap().set_len(1 << 20).unwrap();
    assert_eq!(run.writer(&Timestamps::manual(1)).position().end, 1 << 20);
    assert_eq!(run.reader().events(ALL_EVENTS).unwrap().events.len(), 4);
}

#[tokio::test]
async fn a_reader_waits_for_a_stream_that_does_not_exist_yet() {
    let run = RunDir::new();
    let ended = tokio_util::sync::CancellationToken::new();
    let source = StreamSource::there(run.reader(), Watcher::default(), ended.clone());
    assert_eq!(source.wait(0, Duration::from_millis(1)).await.unwrap(), Position::default());
    let (waited, ()) = tokio::join!(source.wait(0, Duration::from_secs(60)), async {
        run.writer(&Timestamps::new()).append(b"now").unwrap();
    });
    assert_eq!(waited.unwrap().end, 3);
    ended.cancel();
    assert_eq!(source.wait_complete().await, 3);
}
