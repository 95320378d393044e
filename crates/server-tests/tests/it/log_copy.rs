//! Copies of logs from well-behaved and from misbehaving hosts.

use std::{sync::Arc, time::Duration};

use parking_lot::Mutex;
use windlass_api::agent::client::LogPart;
use windlass_model::{id::InstanceId, time::Timestamp};
use windlass_server::{
    agents::{AgentApi, AgentError, CallContext},
    db::Db,
    logs::{
        Log, LogRange, LogStore,
        copier::{
            self, CHUNK_BYTES_MAX, CopyError, CopyLimits, CopyProgress, LogCopier, TRUNCATION_NOTICE,
            catch_up,
        },
        files::FileLogStore,
        notifying_store::NotifyingLogStore,
    },
};
use windlass_testkit::{TempDir, temp_dir};

use crate::{
    logs::{new_log, random_id},
    scripted_hosts::ScriptedHosts,
};

/// A well-behaved host with this log.
fn hosts_with_log(bytes: Vec<u8>, is_complete: bool) -> ScriptedHosts {
    ScriptedHosts::with_log(move |offset, limit| Ok(log_part(&bytes, offset, limit, is_complete)))
}

fn log_part(bytes: &[u8], offset: u64, limit: usize, is_complete: bool) -> LogPart {
    let rest = bytes.get(offset as usize..).unwrap_or_default();
    LogPart { bytes: rest[..rest.len().min(limit)].to_vec().into(), end: bytes.len() as u64, is_complete }
}

struct CopyTestEnv {
    archive: Arc<NotifyingLogStore>,
    log: Log,
    _home: TempDir,
}

impl CopyTestEnv {
    fn new() -> Self {
        let home = temp_dir("logs").unwrap();
        let archive = Arc::new(NotifyingLogStore::new(Arc::new(FileLogStore::new(home.path().to_owned()))));
        Self { archive, log: new_log(), _home: home }
    }

    fn call(&self) -> CallContext {
        CallContext { instance: InstanceId(random_id()), submission: self.log.submission, epoch: 1 }
    }

    async fn copy(&self, host: &ScriptedHosts, limits: CopyLimits) -> Result<CopyProgress, CopyError> {
        catch_up(&self.archive, host, self.call(), &self.log, Timestamp(5), limits).await
    }

    async fn bytes(&self) -> Vec<u8> {
        let all = LogRange {
            from: None,
            after: None,
            until: None,
            descending: false,
            pieces_max: usize::MAX,
            bytes_max: usize::MAX,
        };
        self.archive.read(&self.log, all).await.unwrap().into_iter().flat_map(|piece| piece.bytes).collect()
    }
}

fn random_bytes(len: usize) -> Vec<u8> {
    let mut bytes = vec![0; len];
    getrandom::fill(&mut bytes).unwrap();
    bytes
}

#[tokio::test]
async fn o1_a_log_is_copied_byte_for_byte_and_a_second_copy_adds_nothing() {
    let (kept, whole) = (CopyTestEnv::new(), random_bytes(3 * CHUNK_BYTES_MAX + 17));
    let host = hosts_with_log(whole.clone(), false);
    let end = whole.len() as u64;
    let progress = kept.copy(&host, CopyLimits::default()).await.unwrap();
    assert_eq!(progress, CopyProgress { end, complete: false, more: false });
    let host = hosts_with_log(whole.clone(), true);
    let progress = kept.copy(&host, CopyLimits::default()).await.unwrap();
    assert_eq!(progress, CopyProgress { end, complete: true, more: false });
    assert_eq!(*host.log_reads.lock(), [(end, CHUNK_BYTES_MAX)], "only what is new is asked for");
    assert!(kept.bytes().await == whole);
    assert_eq!(kept.archive.open_log_count(), 0);
}

#[tokio::test]
async fn a_log_copy_stops_at_its_limits_and_the_next_resumes_there() {
    let (kept, whole) = (CopyTestEnv::new(), random_bytes(5 * CHUNK_BYTES_MAX));
    let host = hosts_with_log(whole.clone(), true);
    let limits = CopyLimits { bytes: 2 * CHUNK_BYTES_MAX as u64, ..CopyLimits::default() };
    let first = kept.copy(&host, limits).await.unwrap();
    assert_eq!(first, CopyProgress { end: 2 * CHUNK_BYTES_MAX as u64, complete: false, more: true });
    let in_no_time = CopyLimits { time: Duration::ZERO, ..CopyLimits::default() };
    let second = kept.copy(&host, in_no_time).await.unwrap();
    assert_eq!(second, CopyProgress { end: 3 * CHUNK_BYTES_MAX as u64, complete: false, more: true });
    assert!(kept.copy(&host, CopyLimits::default()).await.unwrap().complete);
    assert!(kept.bytes().await == whole);
}

#[tokio::test]
async fn a_host_that_announces_log_bytes_but_sends_none_is_read_once() {
    let kept = CopyTestEnv::new();
    let host = ScriptedHosts::with_log(|_, _| {
        Ok(LogPart { bytes: Vec::new().into(), end: 1 << 42, is_complete: false })
    });
    let progress = kept.copy(&host, CopyLimits::default()).await.unwrap();
    assert_eq!(
        (progress, host.log_reads.lock().len()),
        (CopyProgress { end: 0, complete: false, more: true }, 1)
    );
    let host = ScriptedHosts::with_log(|_, _| {
        Ok(LogPart { bytes: Vec::new().into(), end: u64::MAX, is_complete: true })
    });
    let progress = kept.copy(&host, CopyLimits::default()).await.unwrap();
    assert!(!progress.complete, "what it says it has is not here");
}

#[tokio::test]
async fn an_endless_log_is_truncated_with_a_notice() {
    let kept = CopyTestEnv::new();
    let host = ScriptedHosts::with_log(|_, limit| {
        Ok(LogPart { bytes: vec![b'x'; limit * 2].into(), end: u64::MAX, is_complete: false })
    });
    let limits = CopyLimits { kept: 1_000_000, ..CopyLimits::default() };
    let progress = kept.copy(&host, limits).await.unwrap();
    let end = 1_000_000 + TRUNCATION_NOTICE.len() as u64;
    assert_eq!(progress, CopyProgress { end, complete: true, more: false });
    let requested = host.log_reads.lock().len();
    assert!(requested <= 6, "{requested} reads");
    assert_eq!(kept.copy(&host, limits).await.unwrap(), progress);
    assert_eq!(host.log_reads.lock().len(), requested, "a full log is not asked for");
    let bytes = kept.bytes().await;
    assert!(bytes[..1_000_000].iter().all(|byte| *byte == b'x'));
    assert_eq!(&bytes[1_000_000..], TRUNCATION_NOTICE);
}

#[tokio::test]
async fn a_log_of_exactly_the_maximum_length_is_complete() {
    let (kept, whole) = (CopyTestEnv::new(), random_bytes(1000));
    let host = hosts_with_log(whole.clone(), true);
    let limits = CopyLimits { kept: 1000, ..CopyLimits::default() };
    assert!(kept.copy(&host, limits).await.unwrap().complete);
    assert!(kept.copy(&host, limits).await.unwrap().complete);
    assert!(kept.bytes().await == whole);
}

#[tokio::test]
async fn log_bytes_beyond_the_requested_length_are_ignored() {
    let kept = CopyTestEnv::new();
    let host = ScriptedHosts::with_log(|offset, limit| {
        let end = 2 * CHUNK_BYTES_MAX as u64;
        Ok(LogPart { bytes: vec![(offset >> 18) as u8; limit * 3].into(), end, is_complete: true })
    });
    let progress = kept.copy(&host, CopyLimits::default()).await.unwrap();
    assert_eq!(progress, CopyProgress { end: 2 * CHUNK_BYTES_MAX as u64, complete: true, more: false });
    let bytes = kept.bytes().await;
    let (first, second) = bytes.split_at(CHUNK_BYTES_MAX);
    assert!(first.iter().all(|byte| *byte == 0) && second.iter().all(|byte| *byte == 1));
}

#[tokio::test]
async fn a_log_that_shrinks_on_its_host_keeps_the_copied_bytes() {
    let (kept, whole) = (CopyTestEnv::new(), random_bytes(5000));
    kept.copy(&hosts_with_log(whole.clone(), false), CopyLimits::default()).await.unwrap();
    let shrunk = hosts_with_log(whole[..100].to_vec(), false);
    let progress = kept.copy(&shrunk, CopyLimits::default()).await.unwrap();
    assert_eq!(
        (progress, shrunk.log_reads.lock().len()),
        (CopyProgress { end: 5000, complete: false, more: false }, 1)
    );
    assert!(kept.copy(&hosts_with_log(Vec::new(), true), CopyLimits::default()).await.unwrap().complete);
    assert!(kept.bytes().await == whole);
}

#[tokio::test]
async fn a_host_failure_during_a_log_copy_loses_no_bytes() {
    let (kept, whole) = (CopyTestEnv::new(), random_bytes(4 * CHUNK_BYTES_MAX));
    let message = whole.clone();
    let calls = Mutex::new(0);
    let host = ScriptedHosts::with_log(move |offset, limit| {
        let mut calls = calls.lock();
        *calls += 1;
        if *calls % 2 == 0 {
            return Err(AgentError::silent(InstanceId(random_id())));
        }
        Ok(log_part(&message, offset, limit, true))
    });
    let mut failures = 0;
    loop {
        match kept.copy(&host, CopyLimits::default()).await {
            Ok(progress) if progress.complete => break,
            Ok(_) => {}
            Err(CopyError::Agent(_)) => failures += 1,
            Err(error) => panic!("{error}"),
        }
    }
    assert_eq!(failures, 3);
    assert!(kept.bytes().await == whole);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn replicas_that_copy_the_same_log_at_once_make_one_log() {
    let (kept, whole) = (CopyTestEnv::new(), random_bytes(40 * CHUNK_BYTES_MAX + 5));
    let host = Arc::new(hosts_with_log(whole.clone(), true));
    // Each replica is a separate process: it knows nothing of the others' copies.
    let copies: Vec<_> = (0..4)
        .map(|_| {
            let replica = NotifyingLogStore::new(Arc::clone(&kept.archive) as Arc<dyn LogStore>);
            let (host, call, log) = (Arc::clone(&host), kept.call(), kept.log);
            tokio::spawn(async move {
                let limits = CopyLimits { bytes: 3 * CHUNK_BYTES_MAX as u64, ..CopyLimits::default() };
                while !catch_up(&replica, &*host, call, &log, Timestamp(1), limits).await.unwrap().complete {}
            })
        })
        .collect();
    for copy in copies {
        copy.await.unwrap();
    }
    assert!(kept.bytes().await == whole);
}

#[tokio::test]
async fn repeated_log_notifications_are_merged_into_one_read() {
    let (kept, whole) = (CopyTestEnv::new(), random_bytes(1000));
    let mut host = hosts_with_log(whole.clone(), false);
    host.log_pause = Duration::from_millis(50);
    let host = Arc::new(host);
    let agents: Arc<dyn AgentApi> = Arc::clone(&host) as Arc<dyn AgentApi>;
    let db = Db::open_inline(Arc::new(|| 7), 1).unwrap();
    let copier = LogCopier::new(Arc::clone(&kept.archive), db, CopyLimits::default());
    let call = kept.call();
    for _ in 0..1000 {
        copier.received(&agents, call, kept.log);
    }
    // More growth is reported during the first read: that causes one more read, and only one.
    let looking = async {
        while host.log_reads.lock().is_empty() {
            tokio::time::sleep(Duration::from_millis(1)).await;
        }
    };
    tokio::time::timeout(Duration::from_secs(10), looking).await.unwrap();
    for _ in 0..1000 {
        copier.received(&agents, call, kept.log);
    }
    let idle = async {
        while kept.archive.open_log_count() > 0 {
            tokio::time::sleep(Duration::from_millis(1)).await;
        }
    };
    tokio::time::timeout(Duration::from_secs(10), idle).await.unwrap();
    assert!(kept.bytes().await == whole);
    // The first read returns all that the host has, the second finds no more.
    assert_eq!(*host.log_reads.lock(), [(0, CHUNK_BYTES_MAX), (1000, CHUNK_BYTES_MAX)]);
}

#[test]
fn chunk_call_and_log_size_limits_are_in_increasing_order() {
    assert!(
        (copier::CHUNK_BYTES_MAX as u64) < copier::CALL_BYTES_MAX
            && copier::CALL_BYTES_MAX < copier::LOG_BYTES_MAX
    );
}
