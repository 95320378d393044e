//! Slurm's commands, as a dispatcher uses them.

use std::{fs, os::unix::fs::PermissionsExt as _, path::PathBuf, process::Command, time::Instant};

use windlass_dispatch::{
    scheduler::{Scheduler as _, StopMode, SubmitError, SubmitRequest},
    slurm::{Settings, Slurm},
};
use windlass_model::dispatch::{
    Attempt, ContainerNeeds, SchedulerJob, SchedulerJobState, SchedulerSnapshot,
    select::{Capacity as _, Fit},
};
use windlass_testkit::slurm::{NodeSize, SlurmCluster};
use windlass_testkit::wait::{TIMEOUT, eventually_ok_async};

const TAG: &str = "windlass:test";
const SIZE: NodeSize = NodeSize { cpus: 4, memory_mib: 4000, gpus: 0, gpu_type: None };

/// Cluster with a stand-in for the executor on its nodes: a script that records that it ran.
struct SlurmFixture {
    cluster: SlurmCluster,
    slurm: Slurm,
}

impl SlurmFixture {
    fn start(sizes: &[NodeSize], script: &str) -> Self {
        let cluster = SlurmCluster::start(sizes);
        let executor = cluster.dir().join("executor");
        fs::write(&executor, format!("#!/bin/sh\ncd {}\n{script}\n", cluster.dir().display())).unwrap();
        fs::set_permissions(&executor, fs::Permissions::from_mode(0o755)).unwrap();
        let slurm = Slurm::new(Self::settings(&cluster, executor));
        Self { cluster, slurm }
    }

    fn settings(cluster: &SlurmCluster, executor: PathBuf) -> Settings {
        Settings { config: Some(cluster.config()), ..Settings::new(TAG, executor) }
    }

    fn written(&self, name: &str) -> String {
        fs::read_to_string(self.cluster.dir().join(name)).unwrap_or_default()
    }

    async fn wait_until(
        &self,
        what: &str,
        mut is: impl FnMut(&SchedulerSnapshot) -> bool,
    ) -> SchedulerSnapshot {
        eventually_ok_async(what, async || match self.slurm.snapshot().await {
            Ok(seen) if is(&seen) => Ok(seen),
            other => Err(format!("{other:?}")),
        })
        .await
    }
}

fn attempt(name: &str) -> Attempt {
    Attempt { uuid: format!("wlass-dz642-{name}"), number: 1 }
}

fn order(name: &str, priority: u64, cpus: u32) -> SubmitRequest {
    let needs = ContainerNeeds { cpus, memory: 100 << 20, ..ContainerNeeds::default() };
    let environment = vec![("WINDLASS_QUEUE_URL".to_owned(), "http://windlass".to_owned())];
    SubmitRequest { attempt: attempt(name), priority, needs, environment, token: format!("token-of-{name}") }
}

fn find<'a>(lower: &'a SchedulerSnapshot, name: &str) -> Option<&'a SchedulerJob> {
    lower.find(&attempt(name))
}

#[tokio::test]
async fn slurm_container_gets_its_token_on_stdin_and_not_the_dispatchers_environment() {
    let script = r#"echo "$*" >> ran; env > environment; cat > given; scontrol show job $SLURM_JOB_ID > shown
        tr '\0' '\n' < /proc/$$/environ >> environment; tr '\0' ' ' < /proc/$$/cmdline >> shown"#;
    let kit = SlurmFixture::start(&[SIZE], script);
    let id = kit.slurm.submit(&order("a", 600, 1)).await.unwrap();
    let over = |lower: &SchedulerSnapshot| find(lower, "a").is_some_and(|job| job.state.is_ended());
    let seen = kit.wait_until("the job ends", over).await;
    let job = find(&seen, "a").unwrap();
    assert_eq!((job.id.as_str(), job.priority), (id.as_str(), Some(600)));
    assert_eq!(kit.written("ran"), "exec wlass-dz642-a --attempt 1\n");
    let environment = kit.written("environment");
    assert!(environment.contains("WINDLASS_QUEUE_URL=http://windlass"), "{environment}");
    assert_eq!(kit.written("given"), "token-of-a\n", "it is on its standard input");
    let shown = kit.written("shown");
    assert!(shown.contains("wlass-dz642-a"), "{shown}");
    for reported in [&environment, &shown] {
        assert!(!reported.contains("token-of-a"), "anybody sees the token: {reported}");
    }
    assert!(!environment.contains("CARGO"), "the dispatcher's own environment came along: {environment}");
    // The end keeps the time at which it was first observed.
    let again = kit.slurm.snapshot().await.unwrap();
    assert_eq!(find(&again, "a").unwrap().state, job.state);
}

#[tokio::test]
async fn jobs_of_other_users_are_never_taken_for_those_of_the_dispatcher() {
    let kit = SlurmFixture::start(&[SIZE], "while [ ! -e go ]; do sleep 0.05; done");
    // Its name prints a line that looks like a job of the dispatcher, and one that looks like nothing known.
    let name = format!("x\n7;wlass-dz642-forged.1;RUNNING;0;n1;None;{TAG}\ny");
    let mut sbatch = Command::new("setpriv");
    sbatch.args(["--reuid=65534", "--regid=65534", "--clear-groups", "env"]);
    sbatch.arg(format!("SLURM_CONF={}", kit.cluster.config().display())).args(["sbatch", "--hold"]);
    sbatch.args(["--chdir=/tmp", "--output=/dev/null", "--wrap=sleep 600", "--job-name", &name]);
    let requested = sbatch.output().unwrap();
    assert!(requested.status.success(), "{requested:?}");
    let all = kit.cluster.say("squeue", &["-h", "-t", "all", "-o", "%i;%j;%k"]);
    assert!(all.contains("\n7;wlass-dz642-forged.1;"), "the scheduler prints the name as it is: {all}");
    kit.slurm.submit(&order("own", 500, 1)).await.unwrap();
    let seen = kit.wait_until("the own job is listed", |lower| find(lower, "own").is_some()).await;
    assert_eq!(seen.jobs.len(), 1, "{seen:?}");
    fs::write(kit.cluster.dir().join("go"), "").unwrap();
}

#[tokio::test]
async fn waiting_jobs_start_by_priority_including_later_changes() {
    let kit = SlurmFixture::start(&[SIZE], r#"echo "$2" >> order; while [ ! -e go ]; do sleep 0.05; done"#);
    kit.slurm.submit(&order("first", 1, 4)).await.unwrap();
    kit.wait_until("the node is taken", |lower| {
        find(lower, "first").is_some_and(|job| job.state == SchedulerJobState::Running)
    })
    .await;
    for (name, priority) in [("low", 100), ("mid", 500), ("raised", 50)] {
        kit.slurm.submit(&order(name, priority, 4)).await.unwrap();
    }
    let seen = kit.wait_until("all wait", |lower| lower.jobs.len() == 4).await;
    kit.slurm.renice(&find(&seen, "raised").unwrap().id, 900).await.unwrap();
    kit.wait_until("it is less nice", |lower| {
        find(lower, "raised").is_some_and(|job| job.priority == Some(900))
    })
    .await;
    fs::write(kit.cluster.dir().join("go"), "").unwrap();
    kit.wait_until("all end", |lower| lower.jobs.iter().all(|job| job.state.is_ended())).await;
    let order: Vec<String> =
        kit.written("order").lines().map(|line| line.trim_start_matches("wlass-dz642-").to_owned()).collect();
    assert_eq!(order, ["first", "raised", "mid", "low"]);
}

#[tokio::test]
async fn stopping_a_waiting_or_running_job_is_idempotent() {
    let kit = SlurmFixture::start(
        &[SIZE],
        "trap 'echo asked > asked; exit 0' TERM; echo yes > listens; while :; do sleep 0.05; done",
    );
    let running = kit.slurm.submit(&order("runs", 500, 4)).await.unwrap();
    // Slurm reports a job as running before its program is: one that is signalled too early dies without output.
    kit.wait_until("it runs and listens", |lower| {
        find(lower, "runs").is_some_and(|job| job.state == SchedulerJobState::Running)
            && !kit.written("listens").is_empty()
    })
    .await;
    let waiting = kit.slurm.submit(&order("waits", 500, 4)).await.unwrap();
    // A job that was just started may miss the first signal, so a dispatcher repeats it until the job has ended.
    let since = Instant::now();
    while !kit.slurm.snapshot().await.unwrap().jobs.iter().all(|job| job.state.is_ended()) {
        assert!(since.elapsed() < TIMEOUT, "they do not end");
        for id in [&waiting, &running] {
            kit.slurm.stop(id, StopMode::Request).await.unwrap();
        }
    }
    assert_eq!(
        kit.written("asked"),
        "asked\n",
        "the one that ran was asked, the one that waited never started"
    );
    for id in [&waiting, &running] {
        kit.slurm.stop(id, StopMode::Request).await.unwrap();
        kit.slurm.stop(id, StopMode::Force).await.unwrap();
    }
}

#[tokio::test]
async fn impossible_container_needs_are_detected_early_and_refused_at_submission() {
    let kit = SlurmFixture::start(&[SIZE, NodeSize { gpus: 2, ..SIZE }], "true");
    let lower = kit.slurm.snapshot().await.unwrap();
    let room = kit.slurm.room(&lower).await.unwrap();
    let with = |cpus, gpus| ContainerNeeds { cpus, gpus, memory: 1 << 20, ..ContainerNeeds::default() };
    assert_eq!(room.check_fit(&with(4, 2)), Fit::Now);
    assert_eq!(
        room.check_fit(&with(5, 0)),
        Fit::Never("no node is large enough: 5 CPUs requested, 4 available".into())
    );
    assert_eq!(
        room.check_fit(&with(1, 3)),
        Fit::Never("no node is large enough: 3 GPUs requested, 2 available".into())
    );
    let on = |feature: &str| ContainerNeeds { features: vec!["any".into(), feature.into()], ..with(1, 0) };
    assert_eq!(room.check_fit(&on("on-n2")), Fit::Now);
    assert_eq!(room.check_fit(&on("on-n9")), Fit::Never("no node with any and on-n9".into()));
    let refused = kit.slurm.submit(&order("huge", 500, 64)).await;
    assert!(matches!(refused, Err(SubmitError::Refused { .. })), "{refused:?}");
}

#[tokio::test]
async fn r15_an_unreachable_controller_is_an_error_and_not_an_empty_cluster() {
    let mut kit = SlurmFixture::start(&[SIZE], "sleep 600");
    kit.slurm.submit(&order("a", 500, 1)).await.unwrap();
    kit.wait_until("it runs", |lower| {
        find(lower, "a").is_some_and(|job| job.state == SchedulerJobState::Running)
    })
    .await;
    kit.cluster.kill_controller();
    assert!(kit.slurm.snapshot().await.is_err());
    let unclear = kit.slurm.submit(&order("b", 500, 1)).await;
    assert!(matches!(unclear, Err(SubmitError::Unclear(_))), "{unclear:?}");
    kit.cluster.start_controller();
    kit.wait_until("it answers again", |lower| lower.is_complete).await;
}

#[tokio::test]
async fn c5_jobs_without_the_dispatchers_tag_are_not_listed() {
    let kit = SlurmFixture::start(&[SIZE], "true");
    let script = kit.cluster.dir().join("foreign.sh");
    fs::write(&script, "#!/bin/sh\nsleep 600\n").unwrap();
    let script = script.display().to_string();
    let named = format!("--job-name={}", attempt("foreign"));
    let message =
        kit.cluster.say("sbatch", &["--parsable", &named, "--mem=10", "--output=/dev/null", &script]);
    assert!(message.trim().parse::<u32>().is_ok(), "{message}");
    assert_eq!(kit.slurm.snapshot().await.unwrap().jobs, []);
}

#[tokio::test]
async fn slurmrestd_submits_renices_and_refuses_jobs_like_the_commands() {
    let mut kit = SlurmFixture::start(
        &[NodeSize { gpus: 2, ..SIZE }],
        r#"echo "$*" >> ran; env > environment; cat > given"#,
    );
    let rest = Some(kit.cluster.start_rest());
    kit.slurm = Slurm::new(Settings {
        rest,
        ..SlurmFixture::settings(&kit.cluster, kit.cluster.dir().join("executor"))
    });
    let with_gpu = ContainerNeeds { gpus: 1, features: vec!["any".into()], ..order("a", 600, 1).needs };
    let id = kit.slurm.submit(&SubmitRequest { needs: with_gpu, ..order("a", 600, 1) }).await.unwrap();
    let over = |lower: &SchedulerSnapshot| find(lower, "a").is_some_and(|job| job.state.is_ended());
    let seen = kit.wait_until("the job ends", over).await;
    assert_eq!(
        (find(&seen, "a").unwrap().id.as_str(), find(&seen, "a").unwrap().priority),
        (id.as_str(), Some(600))
    );
    assert_eq!(kit.written("ran"), "exec wlass-dz642-a --attempt 1\n");
    let environment = kit.written("environment");
    for want in ["WINDLASS_QUEUE_URL=http://windlass", "SLURM_GPUS_ON_NODE=1", "SLURM_CPUS_ON_NODE=1"] {
        assert!(environment.contains(want), "{want} is not in {environment}");
    }
    assert_eq!(kit.written("given"), "token-of-a\n");
    assert!(!environment.contains("token-of-a"), "anybody sees the token: {environment}");
    // A job that has ended is not an error; a job that can never run is refused with the reason.
    kit.slurm.renice(&id, 100).await.unwrap();
    kit.slurm.renice("99999", 100).await.unwrap();
    let refused = kit.slurm.submit(&order("huge", 500, 64)).await;
    assert!(
        matches!(&refused, Err(SubmitError::Refused { why }) if why.contains("More processors")),
        "{refused:?}"
    );
    let held = kit.cluster.say("sbatch", &["--parsable", "--hold", "--mem=10", "--wrap=true"]);
    kit.slurm.renice(held.trim(), 900).await.unwrap();
    assert_eq!(kit.cluster.say("squeue", &["-h", "-j", held.trim(), "-o", "%y"]).trim(), "100000");
    kit.cluster.kill_controller();
    let unclear = kit.slurm.submit(&order("b", 500, 1)).await;
    assert!(matches!(unclear, Err(SubmitError::Unclear(_))), "{unclear:?}");
    kit.cluster.start_controller();
}
