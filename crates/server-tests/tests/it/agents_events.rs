//! Events of hosts: they make rows due, wake pipelines and start copies of output.

use std::time::{Duration, Instant};

use tokio::time::timeout;
use windlass_api::agent::shim::TaskStatus;
use windlass_backend::AgentEndpoint;
use windlass_server::{
    agents::AgentApi,
    logs::{Log, LogSource, LogStore},
};
use windlass_testkit::wait::{TIMEOUT, eventually_async};

use crate::agents_host::{
    AgentTestEnv, TestShim, call_context, job, minimal_task, on_both_kits, print_measurement,
};

on_both_kits! {
    an_event_makes_the_job_due_and_wakes_its_pipeline
    x6_a_host_cannot_affect_jobs_of_other_hosts
    a_lost_or_returning_host_makes_its_instance_due
    job_output_is_copied_without_a_request
}

async fn an_event_makes_the_job_due_and_wakes_its_pipeline(kit: &AgentTestEnv) {
    let shim = TestShim::start(kit, "simulated").await;
    let run = kit.run("train").await;
    let one = kit.job_start(run, 0, shim.instance, "running").await;
    let two = kit.job_start(run, 1, shim.instance, "terminating").await;
    let waiting = kit.job_start(run, 2, shim.instance, "submitted").await;
    let running = kit.app.hints().subscribe("jobs_running");
    let terminating = kit.app.hints().subscribe("jobs_terminating");

    // The first connection cannot know which events it missed.
    kit.wire.tasks(shim.instance).await.unwrap();
    kit.wait_until_due("jobs", one.0).await;
    kit.wait_until_due("jobs", two.0).await;
    assert!(!kit.is_due("jobs", waiting.0).await, "it waits for a place, not for its host");
    timeout(TIMEOUT, running.wait()).await.unwrap();
    timeout(TIMEOUT, terminating.wait()).await.unwrap();

    for (id, hinted) in [(one, running), (two, terminating)] {
        kit.postpone("jobs", id.0).await;
        hinted.take();
        let at = call_context(shim.instance, id, 1);
        let requested = Instant::now();
        kit.wire.submit_task(at, &minimal_task(id)).await.unwrap();
        timeout(TIMEOUT, hinted.wait()).await.unwrap();
        print_measurement(format_args!(
            "from the call that caused an event to the pipeline's hint: {:?}",
            requested.elapsed()
        ));
        assert!(kit.is_due("jobs", id.0).await, "the hint comes after the commit");
        kit.discard(at).await;
    }
    let mut taken = Vec::new();
    for n in 0..20 {
        // Lets the last batch pass: the test measures one event in a quiet moment.
        tokio::time::sleep(Duration::from_millis(50)).await;
        let id = kit.job_start(run, 100 + n, shim.instance, "running").await;
        let hinted = kit.app.hints().subscribe("jobs_running");
        let requested = Instant::now();
        kit.wire.submit_task(call_context(shim.instance, id, 1), &minimal_task(id)).await.unwrap();
        timeout(TIMEOUT, hinted.wait()).await.unwrap();
        taken.push(requested.elapsed());
    }
    taken.sort();
    print_measurement(format_args!(
        "submit to hint after the poke's commit: median {:?}, worst {:?}",
        taken[10], taken[19]
    ));
}

async fn x6_a_host_cannot_affect_jobs_of_other_hosts(kit: &AgentTestEnv) {
    let shim = TestShim::start(kit, "simulated").await;
    let run = kit.run("train").await;
    let elsewhere = kit.instance(1, AgentEndpoint::Socket { path: "/nowhere".into() }).await;
    let foreign = kit.job_start(run, 0, elsewhere, "running").await;
    let own = kit.job_start(run, 1, shim.instance, "running").await;
    kit.wire.tasks(shim.instance).await.unwrap();
    kit.wait_until_due("jobs", own.0).await;
    kit.postpone("jobs", own.0).await;
    // The host reports both, the foreign one first.
    kit.wire.submit_task(call_context(shim.instance, foreign, 1), &minimal_task(foreign)).await.unwrap();
    kit.wire.submit_task(call_context(shim.instance, own, 1), &minimal_task(own)).await.unwrap();
    kit.wait_until_due("jobs", own.0).await;
    assert!(!kit.is_due("jobs", foreign.0).await);
}

async fn a_lost_or_returning_host_makes_its_instance_due(kit: &AgentTestEnv) {
    let mut shim = TestShim::start(kit, "simulated").await;
    let run = kit.run("train").await;
    let job = kit.job_start(run, 0, shim.instance, "running").await;
    let hinted = kit.app.hints().subscribe("instances");
    kit.wire.tasks(shim.instance).await.unwrap();
    kit.wait_until_due("jobs", job.0).await;
    kit.postpone("instances", shim.instance.0).await;
    kit.postpone("jobs", job.0).await;
    hinted.take();
    let killed = Instant::now();
    shim.kill();
    timeout(TIMEOUT, hinted.wait()).await.unwrap();
    print_measurement(format_args!("from the kill of a shim to the instance's hint: {:?}", killed.elapsed()));
    assert!(kit.is_due("instances", shim.instance.0).await);
    assert!(kit.is_due("jobs", job.0).await, "nobody tells of it any more, so it is asked again");
    assert_eq!(kit.wire.connected(), 0);

    kit.postpone("instances", shim.instance.0).await;
    hinted.take();
    shim.start_again();
    kit.wire.tasks(shim.instance).await.unwrap();
    timeout(TIMEOUT, hinted.wait()).await.unwrap();
    assert!(kit.is_due("instances", shim.instance.0).await);
}

async fn job_output_is_copied_without_a_request(kit: &AgentTestEnv) {
    let shim = TestShim::start(kit, "process").await;
    let run = kit.run("train").await;
    let id = kit.job_start(run, 0, shim.instance, "running").await;
    let at = call_context(shim.instance, id, 1);
    kit.wire.submit_task(at, &minimal_task(id)).await.unwrap();
    kit.wait_for_task(at, TaskStatus::Running).await;
    kit.start_job(at, &job(&["/bin/sh", "-c", "echo hello; exec sleep 600"])).await;
    let log = Log { project: kit.made.project, run, submission: id, stream: LogSource::Job };
    let is_copied = async || (kit.app.logs().end(&log).await.unwrap() >= 6).then_some(());
    eventually_async("the log is copied", is_copied).await;
    kit.discard(at).await;
}
