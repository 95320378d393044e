//! Crashes and full disks: nothing that was stored is lost, and nothing is invented.

use std::fs::{File, OpenOptions};

use proptest::prelude::*;

use super::*;
use crate::spool::{index, read::SpoolDamage, write::Error};

fn truncate(path: &Path, left: u64) {
    let file = OpenOptions::new().write(true).open(path).unwrap();
    let length = file.metadata().unwrap().len();
    file.set_len(left.min(length)).unwrap();
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(64))]

    #[test]
    fn f35_a_spool_truncated_anywhere_continues_with_the_remaining_bytes(
        chunks in proptest::collection::vec((1usize..900, 0i64..25), 1..25),
        log_cut: prop::sample::Index, index_cut: prop::sample::Index,
        which in 0..3, finished: bool,
    ) {
        let (run, stamps) = (RunDir::new(), Timestamps::manual(1000));
        let writer = run.writer(&stamps);
        let mut written = Vec::new();
        for (number, (size, pause)) in chunks.iter().enumerate() {
            let bytes = vec![number as u8; *size];
            writer.append(&bytes).unwrap();
            written.extend(bytes);
            stamps.advance(*pause);
        }
        if finished {
            writer.finish().unwrap();
        }
        drop(writer);
        let (log, index) = (run.file("job.log"), run.file("job.idx"));
        if which != 0 {
            truncate(&index, index_cut.index(std::fs::metadata(&index).unwrap().len() as usize + 1) as u64);
        }
        if which != 1 {
            truncate(&log, log_cut.index(written.len() + 1) as u64);
        }
        let left = std::fs::read(&log).unwrap();
        prop_assert!(written.starts_with(&left));
        prop_assert_eq!(&read_all(&run.reader(), 700), &left, "before anybody repairs it");

        let last = stamps.last();
        let writer = run.writer(&stamps);
        prop_assert_eq!(writer.position().end, left.len() as u64);
        let mut all = left;
        if !writer.position().complete {
            writer.append(b"after the crash").unwrap();
            all.extend(b"after the crash");
        }
        let reader = run.reader();
        prop_assert_eq!(&read_all(&reader, 700), &all);
        let events = reader.events(ALL_EVENTS).unwrap().events;
        prop_assert!(events.windows(2).all(|two| two[0].time < two[1].time && two[0].end == two[1].start));
        prop_assert_eq!(events.first().map_or(0, |event| event.start), 0);
        prop_assert_eq!(events.last().map_or(0, |event| event.end), all.len() as u64);
        if !writer.position().complete {
            prop_assert!(events.last().unwrap().time > last, "new bytes have a new time");
        }
        prop_assert_eq!(std::fs::metadata(&index).unwrap().len() % index::SIZE as u64, 0);
    }
}

#[test]
fn f35_a_lost_index_loses_no_bytes_in_reads_by_time() {
    let (run, stamps) = (RunDir::new(), Timestamps::manual(1000));
    let written = vec![7u8; EVENT_MAX as usize * 3 + 5];
    run.writer(&stamps).append(&written).unwrap();
    std::fs::remove_file(run.file("job.idx")).unwrap();
    let covers = |reader: &Reader| {
        let events = reader.events(ALL_EVENTS).unwrap().events;
        assert_eq!(events.len(), 4);
        assert!(events.windows(2).all(|two| two[0].time < two[1].time && two[0].end == two[1].start));
        assert_eq!((events[0].start, events[3].end), (0, written.len() as u64));
    };
    let reader = run.reader();
    covers(&reader);
    assert_eq!(reader.offset_at(1_000_000).unwrap(), written.len() as u64);
    assert_eq!(reader.position().unwrap(), Position { end: written.len() as u64, complete: false });
    drop(run.writer(&stamps));
    covers(&run.reader());
}

#[test]
fn f35_a_flipped_byte_is_reported() {
    let (run, stamps) = (RunDir::new(), Timestamps::manual(1000));
    let writer = run.writer(&stamps);
    for _ in 0..3 {
        writer.append(&[1; 100]).unwrap();
        stamps.advance(20);
    }
    writer.finish().unwrap();
    let mut bytes = std::fs::read(run.file("job.log")).unwrap();
    bytes[150] ^= 4;
    std::fs::write(run.file("job.log"), &bytes).unwrap();
    assert_eq!(run.reader().damage().unwrap(), [SpoolDamage { start: 100, end: 200 }]);
}

#[test]
fn f11_a_full_disk_is_reported_and_stored_output_is_kept() {
    let (run, stamps) = (RunDir::new(), Timestamps::manual(1000));
    let mounted = MountedTmpfs::tmpfs(run.path(), "size=64k");
    let writer = run.writer(&stamps);
    let mut written = Vec::new();
    let kept = loop {
        let bytes = vec![written.len() as u8; 3000];
        match writer.append(&bytes) {
            Ok(()) => written.extend(bytes),
            Err(Error::NoSpace { kept, .. }) => {
                written.extend_from_slice(&bytes[..kept]);
                break kept;
            }
            Err(other) => panic!("{other}"),
        }
        stamps.advance(20);
    };
    assert!(kept < 3000);
    assert_eq!(read_all(&run.reader(), 999), written);
    // Readers are notified of the end although the disk has no space for the mark.
    let _ = writer.finish();
    assert!(writer.position().complete);
    drop(writer);

    let again = run.writer(&stamps);
    assert_eq!(again.position().end, written.len() as u64);
    assert_eq!(read_all(&run.reader(), 999), written);
    drop((again, mounted));
}

#[test]
fn f11_a_record_that_did_not_fit_on_the_disk_is_written_later() {
    let (run, stamps) = (RunDir::new(), Timestamps::manual(1000));
    let mounted = MountedTmpfs::tmpfs(run.path(), "size=64k");
    let writer = run.writer(&stamps);
    writer.append(b"first").unwrap();
    let filler = run.file("filler");
    // Each of the spool's files has a whole page; the log's is not full, so only a new page fails.
    let mut hog = File::create(&filler).unwrap();
    while std::io::Write::write_all(&mut hog, &[0; 4096]).is_ok() {}
    stamps.advance(20);
    let Err(Error::NoSpace { kept, .. }) = writer.append(&[b'x'; 9000]) else { panic!("there is no room") };
    std::fs::remove_file(&filler).unwrap();
    drop(hog);
    stamps.advance(20);
    writer.append(b"last").unwrap();
    let all = read_all(&run.reader(), 10_000);
    assert_eq!(all.len(), 5 + kept + 4);
    assert!(all.starts_with(b"first") && all.ends_with(b"last"));
    writer.finish().unwrap();
    assert_eq!(run.reader().damage().unwrap(), []);
    drop((writer, mounted));
}

/// Small file system mounted over the directory, unmounted when dropped.
struct MountedTmpfs(PathBuf);

impl MountedTmpfs {
    fn tmpfs(at: &Path, options: &str) -> Self {
        let options = std::ffi::CString::new(options).unwrap();
        rustix::mount::mount(
            "tmpfs",
            at,
            "tmpfs",
            rustix::mount::MountFlags::empty(),
            Some(options.as_c_str()),
        )
        .expect("mount a small tmpfs: needs root");
        Self(at.to_owned())
    }
}

impl Drop for MountedTmpfs {
    fn drop(&mut self) {
        let _ = rustix::mount::unmount(&self.0, rustix::mount::UnmountFlags::DETACH);
    }
}
