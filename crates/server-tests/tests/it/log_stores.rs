//! One test suite for all log stores: files, a shared directory and an object store.

use std::sync::{Arc, atomic::Ordering};

use windlass_server::{
    config::SettingsSource,
    logs::{
        Log, LogChunk, LogError, LogRange, LogSource, LogStore,
        files::FileLogStore,
        objects::{Bucket, ObjectLogStore, dir::DirBucket},
    },
};
use windlass_testkit::{TempDir, temp_dir};

use crate::{
    fake_s3::{FakeS3, FakeS3State},
    http::TestServer,
    logs::{FULL_RANGE, joined_text, new_log},
    real_s3::{RealS3, S3Transport},
};

/// Location of the stores of one test; each store acts as a separate process.
enum StoreFixture {
    Files(TempDir),
    Dir(TempDir),
    S3(FakeS3),
    /// An independent implementation of S3, over TLS.
    RealS3(Box<RealS3>),
}

impl StoreFixture {
    fn store(&self) -> Arc<dyn LogStore> {
        match self {
            Self::Files(home) => Arc::new(FileLogStore::new(home.path().to_owned())),
            Self::Dir(home) => {
                Arc::new(ObjectLogStore::new(Arc::new(DirBucket::new(home.path().to_owned()))))
            }
            Self::S3(fake) => Arc::new(ObjectLogStore::new(Arc::new(fake.bucket()))),
            Self::RealS3(real) => Arc::new(ObjectLogStore::new(Arc::new(real.bucket()))),
        }
    }
}

macro_rules! on_all {
    ($($name:ident)*) => {
        mod files {
            $(#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
            async fn $name() {
                super::$name(&super::StoreFixture::Files(super::temp_dir("logs").unwrap())).await;
            })*
        }
        mod dir {
            $(#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
            async fn $name() {
                super::$name(&super::StoreFixture::Dir(super::temp_dir("logs").unwrap())).await;
            })*
        }
        mod s3 {
            $(#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
            async fn $name() {
                super::$name(&super::StoreFixture::S3(super::FakeS3::start(super::FakeS3State::default()).await)).await;
            })*
        }
        /// One store for all: it takes seconds to start.
        #[tokio::test(flavor = "multi_thread", worker_threads = 2)]
        async fn a_real_object_store_passes_every_log_store_test_over_tls() {
            let ground = StoreFixture::RealS3(Box::new(RealS3::start(S3Transport::Tls).await));
            $($name(&ground).await;)*
        }
    };
}

on_all! {
    o1_repeated_appends_add_nothing_and_gaps_are_refused
    ranges_are_read_by_offset_and_by_time_in_both_directions
    appended_bytes_are_read_at_once_and_by_other_processes_after_a_sync
    o1_writers_in_several_processes_make_one_log
    o1_a_log_of_a_killed_writer_can_be_completed
    removing_a_run_removes_its_logs_and_no_others
    settling_a_store_writes_all_buffered_bytes
}

/// Appends as a separate piece.
async fn append_chunk(store: &dyn LogStore, log: &Log, offset: u64, at: i64, bytes: &[u8]) -> u64 {
    let end = store.append_to_files(log, offset, at, bytes).await.unwrap();
    store.sync(log).await.unwrap();
    end
}

async fn o1_repeated_appends_add_nothing_and_gaps_are_refused(ground: &StoreFixture) {
    let (store, log) = (ground.store(), new_log());
    assert_eq!(store.end(&log).await.unwrap(), 0);
    assert!(store.read(&log, FULL_RANGE).await.unwrap().is_empty());
    assert_eq!(append_chunk(&*store, &log, 0, 10, b"hello ").await, 6);
    assert_eq!(append_chunk(&*store, &log, 0, 11, b"hello ").await, 6);
    assert_eq!(append_chunk(&*store, &log, 3, 12, b"lo world").await, 11);
    let gap = store.append_to_files(&log, 12, 13, b"!").await.unwrap_err();
    assert!(matches!(gap, LogError::Gap { offset: 12, end: 11 }), "{gap}");
    let pieces = store.read(&log, FULL_RANGE).await.unwrap();
    assert_eq!(joined_text(&pieces), "hello world");
    assert_eq!(pieces.iter().map(|piece| (piece.offset, piece.at)).collect::<Vec<_>>(), [(0, 10), (6, 12)]);
    // The two streams of a job are separate logs.
    let runner = Log { stream: LogSource::Runner, ..log };
    assert_eq!(store.end(&runner).await.unwrap(), 0);
    assert_eq!(append_chunk(&*store, &runner, 0, 1, b"r").await, 1);
    assert_eq!(ground.store().end(&log).await.unwrap(), 11);
}

async fn ranges_are_read_by_offset_and_by_time_in_both_directions(ground: &StoreFixture) {
    let (store, log) = (ground.store(), new_log());
    for n in 0..20_u64 {
        append_chunk(&*store, &log, n * 3, 100 + n.cast_signed(), format!("{n:02};").as_bytes()).await;
    }
    for store in [store, ground.store()] {
        let read = async |range| joined_text(&store.read(&log, range).await.unwrap());
        assert_eq!(read(LogRange { pieces_max: 3, ..FULL_RANGE }).await, "00;01;02;");
        assert_eq!(read(LogRange { from: Some(9), pieces_max: 2, ..FULL_RANGE }).await, "03;04;");
        assert_eq!(read(LogRange { from: Some(10), pieces_max: 2, ..FULL_RANGE }).await, "3;04;");
        assert_eq!(read(LogRange { from: Some(10), bytes_max: 1, ..FULL_RANGE }).await, "3");
        assert_eq!(read(LogRange { descending: true, pieces_max: 2, ..FULL_RANGE }).await, "19;18;");
        assert_eq!(
            read(LogRange { descending: true, from: Some(57), pieces_max: 2, ..FULL_RANGE }).await,
            "18;17;"
        );
        assert_eq!(read(LogRange { after: Some(102), until: Some(105), ..FULL_RANGE }).await, "03;04;05;");
        assert_eq!(read(LogRange { after: Some(117), descending: true, ..FULL_RANGE }).await, "19;18;");
        assert_eq!(read(LogRange { bytes_max: 7, ..FULL_RANGE }).await, "00;01;");
        assert_eq!(read(LogRange { after: Some(999), ..FULL_RANGE }).await, "");
        assert_eq!(read(LogRange { from: Some(60), ..FULL_RANGE }).await, "");
    }
}

async fn appended_bytes_are_read_at_once_and_by_other_processes_after_a_sync(ground: &StoreFixture) {
    let (here, there, log) = (ground.store(), ground.store(), new_log());
    append_chunk(&*here, &log, 0, 1, b"one ").await;
    here.append_to_files(&log, 4, 2, b"two").await.unwrap();
    assert_eq!(joined_text(&here.read(&log, FULL_RANGE).await.unwrap()), "one two");
    assert_eq!(here.end(&log).await.unwrap(), 7);
    here.sync(&log).await.unwrap();
    assert_eq!(there.end(&log).await.unwrap(), 7);
    assert_eq!(joined_text(&there.read(&log, FULL_RANGE).await.unwrap()), "one two");
    // A store with an outdated end appends after what was written since.
    append_chunk(&*here, &log, 7, 3, b" three").await;
    assert_eq!(append_chunk(&*there, &log, 4, 4, b"two three four").await, 18);
    assert_eq!(joined_text(&there.read(&log, FULL_RANGE).await.unwrap()), "one two three four");
}

async fn o1_writers_in_several_processes_make_one_log(ground: &StoreFixture) {
    let log = new_log();
    let whole: Arc<Vec<u8>> = Arc::new((0..40_000_u32).flat_map(u32::to_be_bytes).collect());
    let writers: Vec<_> = [700_usize, 3000, 11_000, 50_000]
        .into_iter()
        .map(|step| {
            let (store, whole) = (ground.store(), Arc::clone(&whole));
            tokio::spawn(async move {
                let mut end = 0_usize;
                let mut round = 0;
                while end < whole.len() {
                    let until = (end + step).min(whole.len());
                    let appended = store.append_to_files(&log, end as u64, 0, &whole[end..until]).await;
                    end = match appended {
                        Ok(end) => end as usize,
                        Err(LogError::Gap { end, .. }) => end as usize,
                        Err(error) => panic!("{error:?}"),
                    };
                    round += 1;
                    if round % 3 == 0 {
                        store.sync(&log).await.unwrap();
                    }
                }
                store.sync(&log).await.unwrap();
            })
        })
        .collect();
    for writer in writers {
        writer.await.unwrap();
    }
    let pieces: Vec<LogChunk> = ground.store().read(&log, FULL_RANGE).await.unwrap();
    assert!(pieces.iter().flat_map(|piece| &piece.bytes).eq(whole.iter()));
}

async fn o1_a_log_of_a_killed_writer_can_be_completed(ground: &StoreFixture) {
    let log = new_log();
    let whole: Vec<u8> = (0..3_000_000_u32).map(|n| (n % 251) as u8).collect();
    let store = ground.store();
    append_chunk(&*store, &log, 0, 1, &whole[..1000]).await;
    let mut end = 1000;
    for part in whole[1000..2_500_000].chunks(200_000) {
        end = store.append_to_files(&log, end, 2, part).await.unwrap();
    }
    // Its buffered bytes are lost with it.
    drop(store);
    let next = ground.store();
    let mut end = next.end(&log).await.unwrap();
    assert!((1000..=2_500_000).contains(&end), "{end}");
    while (end as usize) < whole.len() {
        let until = (end as usize + 300_000).min(whole.len());
        end = next.append_to_files(&log, end, 3, &whole[end as usize..until]).await.unwrap();
    }
    next.sync(&log).await.unwrap();
    let pieces = ground.store().read(&log, FULL_RANGE).await.unwrap();
    assert!(pieces.iter().flat_map(|piece| &piece.bytes).eq(whole.iter()));
}

async fn removing_a_run_removes_its_logs_and_no_others(ground: &StoreFixture) {
    let (store, elsewhere, old) = (ground.store(), ground.store(), new_log());
    let kept = Log { project: old.project, ..new_log() };
    for log in [&old, &kept] {
        for n in 0..10 {
            append_chunk(&*store, log, n, 1, b"x").await;
        }
    }
    assert_eq!(elsewhere.read(&old, FULL_RANGE).await.unwrap().len(), 10);
    store.remove(old.project, old.run).await.unwrap();
    store.remove(old.project, old.run).await.unwrap();
    assert_eq!(store.end(&old).await.unwrap(), 0);
    assert!(elsewhere.read(&old, FULL_RANGE).await.unwrap().is_empty(), "also where it was known");
    assert_eq!(joined_text(&store.read(&kept, FULL_RANGE).await.unwrap()), "xxxxxxxxxx");
    // A log may begin again under the same name.
    assert_eq!(append_chunk(&*store, &old, 0, 1, b"again").await, 5);
    assert_eq!(ground.store().end(&old).await.unwrap(), 5);
}

async fn settling_a_store_writes_all_buffered_bytes(ground: &StoreFixture) {
    let (here, logs) = (ground.store(), [new_log(), new_log(), new_log()]);
    for log in &logs {
        here.append_to_files(log, 0, 1, b"gathered").await.unwrap();
    }
    here.flush().await.unwrap();
    for log in &logs {
        assert_eq!(joined_text(&ground.store().read(log, FULL_RANGE).await.unwrap()), "gathered");
    }
    here.flush().await.unwrap();
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_stopping_server_flushes_buffered_logs() {
    let (ground, shared, log) = (crate::http::ServerFixture::sqlite(), temp_dir("logs").unwrap(), new_log());
    let place = Some(format!("dir:{}", shared.path().display()));
    let server = TestServer::start_with(SettingsSource { log_store: place, ..ground.given() }).await;
    server.app.logs().append_to_files(&log, 0, 1, b"last words").await.unwrap();
    server.stop().await;
    let elsewhere = ObjectLogStore::new(Arc::new(DirBucket::new(shared.path().to_owned())));
    assert_eq!(joined_text(&elsewhere.read(&log, FULL_RANGE).await.unwrap()), "last words");
}

#[tokio::test]
async fn a_real_object_store_accepts_our_signatures_and_rejects_wrong_ones() {
    let real = RealS3::start(S3Transport::Tcp).await;
    real.bucket().check().await.unwrap();
    let wrong = real.bucket_with("a wrong secret").check().await.unwrap_err().to_string();
    assert!(wrong.contains("403") && wrong.contains("SignatureDoesNotMatch"), "{wrong}");
    let (store, log) = (ObjectLogStore::new(Arc::new(real.bucket())), new_log());
    for n in 0..3 {
        append_chunk(&store, &log, n * 5, 1, b"piece").await;
    }
    // The listing of another client with the same key.
    let name = format!("a/b/{}/{}/{}/job/", log.project, log.run, log.submission);
    let want: Vec<String> = (0..3).map(|n| format!("{name}{:016x} 17 piece", n * 5)).collect();
    assert_eq!(real.listed(), want);
}

#[tokio::test]
async fn an_object_store_with_an_untrusted_certificate_is_refused() {
    let real = RealS3::start(S3Transport::Tls).await;
    let error = real.bucket_trusting("/etc/ssl/certs/ca-certificates.crt").check().await.unwrap_err();
    assert!(error.to_string().contains("certificate"), "{error}");
}

#[tokio::test]
async fn a_failing_object_store_neither_loses_nor_duplicates_bytes() {
    let fake = FakeS3::start(FakeS3State::default()).await;
    let (store, log) = (ObjectLogStore::new(Arc::new(fake.bucket())), new_log());
    let mut whole = Vec::new();
    for n in 0..30_u64 {
        fake.shop.fail_before.store((n % 3) as usize, Ordering::SeqCst);
        // Processed, but the response is lost: the retry finds its own object.
        fake.shop.fail_after.store((n % 2) as usize, Ordering::SeqCst);
        let part = vec![n as u8; 100];
        append_chunk(&store, &log, whole.len() as u64, 1, &part).await;
        whole.extend(part);
    }
    let pieces = ObjectLogStore::new(Arc::new(fake.bucket())).read(&log, FULL_RANGE).await.unwrap();
    assert!(pieces.iter().flat_map(|piece| &piece.bytes).eq(&whole));
    fake.shop.fail_before.store(100, Ordering::SeqCst);
    let error = store.end(&log).await.unwrap_err();
    let cause = std::error::Error::source(&error).unwrap().to_string();
    assert!(cause.contains("500") && cause.contains("InternalError"), "{cause}");
}

#[tokio::test]
async fn an_unusable_log_store_is_reported_at_startup() {
    let fake = FakeS3::start(FakeS3State::default()).await;
    fake.bucket().check().await.unwrap();
    assert!(fake.bucket().list("check/", None).await.unwrap().objects.is_empty(), "nothing is left behind");
    let error = fake.bucket_with("a wrong secret").check().await.unwrap_err().to_string();
    assert!(error.contains("403") && error.contains("SignatureDoesNotMatch"), "{error}");
    let careless = FakeS3::start(FakeS3State { ignores_conditions: true, ..FakeS3State::default() }).await;
    let error = careless.bucket().check().await.unwrap_err().to_string();
    assert!(error.contains("If-None-Match"), "{error}");
}

#[tokio::test]
async fn reading_a_damaged_log_object_is_an_error() {
    let home = temp_dir("logs").unwrap();
    let (store, log) = (ObjectLogStore::new(Arc::new(DirBucket::new(home.path().to_owned()))), new_log());
    append_chunk(&store, &log, 0, 1, b"precious").await;
    let name = format!("{}/{}/{}/job/{:016x}", log.project, log.run, log.submission, 0);
    let mut bytes = std::fs::read(home.path().join(&name)).unwrap();
    *bytes.last_mut().unwrap() ^= 1;
    std::fs::write(home.path().join(&name), bytes).unwrap();
    let error = store.read(&log, FULL_RANGE).await.unwrap_err();
    let cause = std::error::Error::source(&error).unwrap().to_string();
    assert_eq!(cause, "the chunk at offset 0 is damaged");
}
