//! A task that uses more disk than it requested.

use super::*;
use crate::shim::disk_limit::check_limits;

#[tokio::test]
async fn a_task_over_its_disk_limit_is_terminated_and_reports_the_reason() {
    let env = TestHost::new("disk").await;
    // The limit of the first is a mebibyte, that of the second is more than it will use, the third has none.
    for (n, disk) in [(1, 1 << 20), (2, 1 << 30), (3, 0)] {
        let spec = TaskSpec { disk, ..spec(n) };
        env.tasks().submit(spec, Some(1)).await.unwrap();
        env.wait_for_status(id(n), TaskStatus::Running).await;
        let scratch = env.tasks().dir(id(n)).unwrap().scratch();
        std::fs::create_dir_all(&scratch).unwrap();
        std::fs::write(scratch.join("results"), vec![7; 2 << 20]).unwrap();
    }
    check_limits(env.tasks(), &env.fake).await;
    let over = env.wait_for_status(id(1), TaskStatus::Terminated).await;
    assert_eq!(
        (over.termination_reason.as_str(), over.detail.as_deref()),
        ("executor_error", Some("disk_limit_exceeded"))
    );
    assert!(over.termination_message.starts_with("disk limit exceeded: the job uses 2.0"), "{over:?}");
    for n in [2, 3] {
        assert_eq!(env.tasks().info(id(n)).unwrap().status, TaskStatus::Running);
    }
    // Once is enough, and a restarted shim knows it too.
    check_limits(env.tasks(), &env.fake).await;
    env.check();
}
