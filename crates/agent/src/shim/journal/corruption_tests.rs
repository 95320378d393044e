//! Truncation at every byte and corruption of every byte of a small journal.

use super::{super::tasks::TaskEnd, *};

fn id(n: u128) -> SubmissionId {
    SubmissionId(uuid::Uuid::from_u128(n))
}

fn sample_records() -> Vec<Record> {
    let handle = Handle { name: "train".to_owned(), id: "c0ffee".to_owned() };
    let end = TaskEnd {
        reason: "done_by_runner".to_owned(),
        message: String::new(),
        exit_status: Some(0),
        detail: None,
    };
    let kinds = [
        (1, JournalEvent::Submitted),
        (1, JournalEvent::GpuAcquired { gpus: vec!["GPU-1".to_owned()] }),
        (2, JournalEvent::Submitted),
        (1, JournalEvent::ContainerCreated { handle }),
        (1, JournalEvent::ContainerStarted { ports: Vec::new() }),
        (2, JournalEvent::Removed),
        (1, JournalEvent::Terminated { end }),
    ];
    let seqs = 1..;
    seqs.zip(kinds)
        .map(|(seq, (task, kind))| Record { seq, at: 1, submission: id(task), epoch: 3, kind })
        .collect()
}

fn encoded(records: &[Record]) -> (Vec<u8>, Vec<usize>) {
    let (mut bytes, mut ends) = (Vec::new(), Vec::new());
    for record in records {
        frame::encode(record, &mut bytes).unwrap();
        ends.push(bytes.len());
    }
    (bytes, ends)
}

#[test]
fn f35_truncation_at_any_byte_keeps_exactly_the_complete_records() {
    let records = sample_records();
    let (bytes, ends) = encoded(&records);
    for cut in 0..=bytes.len() {
        let whole = ends.iter().filter(|end| **end <= cut).count();
        let reading = scan(&bytes[..cut]);
        assert_eq!(reading.records, records[..whole], "cut at {cut}");
        assert_eq!(reading.damage, [], "cut at {cut}");
        let kept = whole.checked_sub(1).map_or(0, |last| ends[last]);
        assert_eq!(reading.torn_bytes, (cut - kept) as u64, "cut at {cut}");
    }
}

#[test]
fn f35_a_flipped_byte_loses_one_record_and_is_reported() {
    let records = sample_records();
    let (bytes, ends) = encoded(&records);
    for at in 0..bytes.len() {
        for flip in [0x01, 0x80, 0xff] {
            let mut damaged = bytes.clone();
            damaged[at] ^= flip;
            let reading = scan(&damaged);
            let lost = ends.iter().position(|end| at < *end).unwrap();
            let mut expected = records.clone();
            expected.remove(lost);
            assert_eq!(reading.records, expected, "byte {at}");
            let message = !reading.damage.is_empty() || reading.torn_bytes > 0;
            assert!(message, "byte {at} was flipped and nobody said so");
            if lost + 1 < records.len() {
                assert_eq!(reading.damage.len(), 1, "byte {at}");
                assert_eq!(reading.damage[0].after_seq, lost as u64, "byte {at}");
            }
        }
    }
}

#[test]
fn f35_garbage_and_trailing_zeros_are_not_read_as_records() {
    let records = sample_records();
    let (first, _) = encoded(&records[..3]);
    let (rest, _) = encoded(&records[3..]);
    let garbage: Vec<u8> = (0..4000u32).flat_map(|n| (n.wrapping_mul(2_654_435_761)).to_le_bytes()).collect();
    let reading = scan(&[&first[..], &garbage[..], &rest[..]].concat());
    assert_eq!(reading.records, records);
    assert_eq!(reading.damage.len(), 1);
    let reading = scan(&[&first[..], &[0; 4096]].concat());
    assert_eq!((reading.records.len(), reading.torn_bytes, reading.damage.len()), (3, 4096, 0));
    assert_eq!(scan(&garbage).records, []);
}

#[tokio::test]
async fn flushed_records_are_on_disk_and_a_torn_tail_is_truncated() {
    let dir = windlass_testkit::temp_dir("journal").unwrap();
    let path = dir.path().join("journal");
    let (journal, reading) = Journal::open(&path).unwrap();
    assert!(reading.missing);
    let seqs: Vec<_> = (0..20).map(|n| journal.append(id(n), 1, JournalEvent::Submitted)).collect();
    futures_util::future::join_all(seqs.iter().map(|seq| journal.flush(*seq))).await;
    assert_eq!(read(&path).unwrap().records.len(), 20);
    assert!(matches!(Journal::open(&path), Err(Error::Locked { .. })), "one home, one shim");
    journal.close().await;
    // An incomplete record does not prevent further writes.
    let mut bytes = std::fs::read(&path).unwrap();
    bytes.truncate(bytes.len() - 3);
    std::fs::write(&path, &bytes).unwrap();
    let (journal, reading) = Journal::open(&path).unwrap();
    assert_eq!(reading.records.len(), 19);
    let seq = journal.append(id(99), 1, JournalEvent::Submitted);
    journal.flush(seq).await.unwrap();
    let reading = read(&path).unwrap();
    assert_eq!((reading.records.len(), reading.torn_bytes, reading.damage.len()), (20, 0, 0));
    assert!(reading.records.windows(2).all(|pair| pair[0].seq < pair[1].seq));
}

#[tokio::test]
async fn written_records_survive_the_process_and_are_on_disk_with_the_next_flush() {
    let dir = windlass_testkit::temp_dir("journal").unwrap();
    let path = dir.path().join("journal");
    let (journal, _) = Journal::open(&path).unwrap();
    let first = journal.append(id(1), 1, JournalEvent::Submitted);
    journal.write(first).await.unwrap();
    assert_eq!(read(&path).unwrap().records.len(), 1, "another process would read it");
    let second = journal.append(id(2), 1, JournalEvent::Submitted);
    journal.write(second).await.unwrap();
    // A file that refuses the next write: what is not known to be on disk is written again, in order.
    let disk = journal.disk.clone().unwrap();
    let whole = std::mem::replace(&mut disk.lock().await.file, File::open(&path).unwrap());
    let third = journal.append(id(3), 1, JournalEvent::Submitted);
    journal.flush(third).await.unwrap_err();
    disk.lock().await.file = whole;
    disk.lock().await.file.set_len(0).unwrap();
    disk.lock().await.file.seek(SeekFrom::Start(0)).unwrap();
    journal.flush(third).await.unwrap();
    let records = read(&path).unwrap().records;
    assert_eq!(records.iter().map(|record| record.seq).collect::<Vec<_>>(), [first, second, third]);
}

#[tokio::test]
async fn a_compacted_journal_continues_its_sequence_numbers() {
    let dir = windlass_testkit::temp_dir("journal").unwrap();
    let path = dir.path().join("journal");
    let (journal, _) = Journal::open(&path).unwrap();
    for n in 0..10 {
        journal.append(id(n), 1, JournalEvent::Submitted);
    }
    journal
        .compact(|records| records.into_iter().filter(|record| record.seq % 2 == 0).collect())
        .await
        .unwrap();
    let seq = journal.append(id(10), 1, JournalEvent::Removed);
    journal.flush(seq).await.unwrap();
    let seqs: Vec<_> = read(&path).unwrap().records.iter().map(|record| record.seq).collect();
    assert_eq!(seqs, [2, 4, 6, 8, 10, 11]);
    journal.close().await;
    let (journal, _) = Journal::open(&path).unwrap();
    assert_eq!(journal.append(id(11), 1, JournalEvent::Submitted), 12);
}

/// A disk of one megabyte would need a mount; a file-size limit of the process would affect other tests. So the full
/// disk is `/dev/full`, on which every write fails with the same error.
#[tokio::test]
async fn f11_a_full_disk_is_an_error_and_pending_records_are_written_later() {
    let dir = windlass_testkit::temp_dir("journal").unwrap();
    let path = dir.path().join("journal");
    let (journal, _) = Journal::open(&path).unwrap();
    let disk = journal.disk.clone().unwrap();
    let good = {
        let full = OpenOptions::new().write(true).open("/dev/full").unwrap();
        std::mem::replace(&mut disk.lock().await.file, full)
    };
    let first = journal.append(id(1), 1, JournalEvent::Submitted);
    assert!(journal.flush(first).await.is_err());
    assert!(!path.with_extension("reserve").exists(), "the reserve was given up first");
    let second = journal.append(id(2), 1, JournalEvent::Submitted);
    disk.lock().await.file = good;
    journal.flush(second).await.unwrap();
    let records = read(&path).unwrap().records;
    assert_eq!(records.iter().map(|record| record.seq).collect::<Vec<_>>(), [first, second]);
}
