//! Calls that are repeated, concurrent, late, or from a server that lost its lock.

use futures_util::future::join_all;

use super::{fake::exit, *};

const CONCURRENT_CALLS: usize = 16;

fn count(kinds: &[JournalEvent], is: impl Fn(&JournalEvent) -> bool) -> usize {
    kinds.iter().filter(|kind| is(kind)).count()
}

#[tokio::test]
async fn a2_sixteen_concurrent_submissions_have_one_effect() {
    let env = TestHost::new("submit-16").await;
    let calls = (0..CONCURRENT_CALLS).map(|_| env.tasks().submit(spec(1), Some(1)));
    assert!(join_all(calls).await.iter().all(Result::is_ok));
    env.wait_for_status(id(1), TaskStatus::Running).await;
    // In any state.
    env.tasks().submit(spec(1), Some(1)).await.unwrap();
    env.fake.end(id(1), exit(0));
    env.wait_for_status(id(1), TaskStatus::Terminated).await;
    env.tasks().submit(spec(1), Some(1)).await.unwrap();
    assert_eq!(count(&env.kinds(id(1)), |kind| *kind == JournalEvent::Submitted), 1);
    assert_eq!(env.tasks().info(id(1)).unwrap().status, TaskStatus::Terminated);
    env.check_empty();
}

#[tokio::test]
async fn a2_sixteen_concurrent_terminates_and_removes_have_one_effect() {
    let env = TestHost::new("end-16").await;
    let id = env.submit(1).await;
    env.wait_for_status(id, TaskStatus::Running).await;
    let reasons: Vec<_> =
        (0..CONCURRENT_CALLS).map(|n| terminate_request(&format!("reason-{n}"), 0)).collect();
    let calls = reasons.iter().map(|stop_request| env.tasks().terminate(id, stop_request.clone(), Some(1)));
    let answers: Vec<_> = join_all(calls).await.into_iter().map(Result::unwrap).collect();
    assert!(answers.iter().all(|info| *info == answers[0]), "{answers:?}");
    assert_eq!(answers[0].status, TaskStatus::Terminated);
    let kinds = env.kinds(id);
    assert_eq!(count(&kinds, |kind| matches!(kind, JournalEvent::TerminateRequested { .. })), 1);
    assert_eq!(count(&kinds, |kind| matches!(kind, JournalEvent::Terminated { .. })), 1);
    let calls = (0..CONCURRENT_CALLS).map(|_| env.tasks().remove(id, Some(1)));
    assert!(join_all(calls).await.iter().all(Result::is_ok));
    assert_eq!(count(&env.kinds(id), |kind| *kind == JournalEvent::Removed), 1);
    env.tasks().remove(id, Some(1)).await.unwrap();
    assert_eq!(count(&env.kinds(id), |kind| *kind == JournalEvent::Removed), 1);
    env.check_empty();
}

#[tokio::test]
async fn a2_a_disconnected_caller_does_not_change_the_result() {
    let env = TestHost::new("dropped").await;
    {
        let submit = env.tasks().submit(spec(1), Some(1));
        tokio::pin!(submit);
        // Polled once and dropped, as a broken connection does.
        let _ = futures_util::poll!(&mut submit);
    }
    env.wait_for_status(id(1), TaskStatus::Running).await;
    {
        let terminate = env.tasks().terminate(id(1), terminate_request("terminated_by_user", 0), Some(1));
        tokio::pin!(terminate);
        let _ = futures_util::poll!(&mut terminate);
    }
    // The first poll may stop at the disk; the repetition has the same effect either way.
    let info =
        env.tasks().terminate(id(1), terminate_request("terminated_by_user", 0), Some(1)).await.unwrap();
    assert_eq!(info.status, TaskStatus::Terminated);
    env.check_empty();
}

#[tokio::test]
async fn l2_a_call_with_an_older_epoch_is_refused_and_recorded() {
    let env = TestHost::new("epochs").await;
    env.tasks().submit(spec(1), Some(5)).await.unwrap();
    let fenced = |result: Result<(), TaskError>| match result {
        Err(TaskError::Fenced { seen, .. }) => seen,
        other => panic!("{other:?}"),
    };
    let tasks = env.tasks();
    assert_eq!(fenced(tasks.submit(spec(1), Some(4)).await), 5);
    assert_eq!(fenced(tasks.terminate(id(1), terminate_request("x", 0), Some(4)).await.map(|_| ())), 5);
    assert_eq!(fenced(tasks.remove(id(1), Some(4)).await), 5);
    tasks.admit(id(1), Some(7)).await.unwrap();
    assert_eq!(fenced(tasks.admit(id(1), Some(6)).await), 7);
    assert_eq!(tasks.info(id(1)).unwrap().epoch, 7);
    // A server without epochs need not send one.
    tasks.admit(id(1), None).await.unwrap();
    assert_eq!(count(&env.kinds(id(1)), |kind| matches!(kind, JournalEvent::RefusedEpoch { .. })), 4);
    env.wait_for_status(id(1), TaskStatus::Running).await;
    tasks.terminate(id(1), terminate_request("x", 0), None).await.unwrap();
    env.check_empty();
}

#[tokio::test]
async fn g8_a_running_task_cannot_be_removed() {
    let env = TestHost::new("alive").await;
    let id = env.submit(1).await;
    env.wait_for_status(id, TaskStatus::Running).await;
    assert!(matches!(env.tasks().remove(id, Some(1)).await, Err(TaskError::Alive { .. })));
    assert!(env.tasks().dir(id).unwrap().root().exists());
}

#[tokio::test]
async fn r7_a_removed_id_is_never_accepted_again() {
    let mut env = TestHost::new("graves").await;
    // Before the submission arrived: the server expects that a late one may follow.
    env.tasks().remove(id(1), Some(3)).await.unwrap();
    assert!(matches!(env.tasks().remove(id(2), None).await, Err(TaskError::NotFound { .. })));
    let second = env.submit(2).await;
    env.wait_for_status(second, TaskStatus::Running).await;
    env.tasks().terminate(second, terminate_request("x", 0), Some(1)).await.unwrap();
    env.tasks().remove(second, None).await.unwrap();
    for n in 1..=2 {
        assert!(matches!(env.tasks().submit(spec(n), Some(9)).await, Err(TaskError::Gone { .. })));
    }
    env.restart().await;
    for n in 1..=2 {
        assert!(matches!(env.tasks().submit(spec(n), Some(9)).await, Err(TaskError::Gone { .. })));
    }
    assert!(matches!(env.tasks().remove(id(1), Some(2)).await, Err(TaskError::Fenced { seen: 3, .. })));
    assert!(matches!(
        env.tasks().terminate(id(1), terminate_request("x", 0), Some(3)).await,
        Err(TaskError::NotFound { .. })
    ));
    env.check_empty();
}

#[tokio::test]
async fn x8_a_refused_specification_is_in_the_journal() {
    let env = TestHost::new("refused").await;
    env.tasks().record_refused_spec(id(1), Some(2), "bad signature").await;
    assert_eq!(env.kinds(id(1)), [JournalEvent::RefusedSpec { why: "bad signature".to_owned() }]);
    env.tasks().submit(spec(1), Some(1)).await.unwrap();
    env.wait_for_status(id(1), TaskStatus::Running).await;
}

#[tokio::test]
async fn refusals_do_not_fill_the_disk() {
    let env = TestHost::new("refusals").await;
    let why = "x".repeat(1000);
    for _ in 0..12 {
        let refusals = (0..1000).map(|n| env.tasks().record_refused_spec(id(n), Some(1), &why));
        futures_util::future::join_all(refusals).await;
    }
    let len = std::fs::metadata(env.home.path().join("journal")).unwrap().len();
    assert!(len < 8 * 1024 * 1024, "{len} bytes");
}

#[tokio::test]
async fn f11_a_submission_that_cannot_be_stored_is_refused_and_can_be_retried() {
    let mut env = TestHost::new("no-disk").await;
    let tasks = env.home.path().join("tasks");
    std::fs::remove_dir(&tasks).unwrap();
    std::fs::write(&tasks, "in the way").unwrap();
    assert!(matches!(env.tasks().submit(spec(1), Some(1)).await, Err(TaskError::NotAccepted { .. })));
    assert!(env.tasks().list().is_empty());
    std::fs::remove_file(&tasks).unwrap();
    std::fs::create_dir(&tasks).unwrap();
    let id = env.submit(1).await;
    env.wait_for_status(id, TaskStatus::Running).await;
    env.restart().await;
    env.wait_for_status(id, TaskStatus::Running).await;
    env.check();
}
