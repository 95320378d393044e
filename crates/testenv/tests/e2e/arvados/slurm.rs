//! The queue on a real Slurm: two hundred containers, while every component below and beside them fails once.

use std::{
    collections::BTreeMap,
    path::{Path, PathBuf},
    process::Command,
    time::{Duration, Instant},
};

use serde_json::json;
use windlass_dispatch::wake_socket::WakeSocket;
use windlass_sim::invariants::containers::find_violations;
use windlass_testenv::{
    queue_env::{QueueEnv, RequestedContainer, processes_matching},
    server::binary_path,
};
use windlass_testkit::slurm::{NodeSize, SlurmCluster};

const TIMEOUT: Duration = Duration::from_secs(120);
const POLL_INTERVAL: Duration = Duration::from_millis(200);
const SIZE: NodeSize = NodeSize { cpus: 4, memory_mib: 4000, gpus: 0, gpu_type: None };
const NODES: usize = 6;
const TAG: &str = "windlass:fortune";
/// Difference of Slurm's nice value per step of priority.
const NICE_STEP: u64 = 1_000;
/// Constraints that select one node.
#[derive(Clone, Copy)]
enum NodeConstraint {
    Anywhere,
    Partition(&'static str),
    Feature(&'static str),
}

/// Parameters of a container.
struct ContainerSpec<'a> {
    priority: u64,
    cpus: u32,
    memory_mib: u64,
    place: NodeConstraint,
    /// File until whose creation it runs.
    gate: Option<&'a str>,
    exit: i64,
}

struct SubmittedContainer {
    requested: RequestedContainer,
    exit: i64,
}

/// A job of this test in `squeue`.
struct SqueueJob {
    state: String,
    nice: u64,
}

struct SlurmQueueEnv {
    cluster: SlurmCluster,
    ground: QueueEnv,
    token: PathBuf,
    all: Vec<SubmittedContainer>,
}

impl Drop for SlurmQueueEnv {
    /// Dispatchers stop first, so that they submit no more; then the cluster with its jobs, then the server.
    fn drop(&mut self) {
        self.ground.kill_dispatchers();
    }
}

impl SlurmQueueEnv {
    async fn start() -> Self {
        let cluster = SlurmCluster::start(&[SIZE; NODES]);
        let ground = QueueEnv::start("slurm").await;
        let token = ground.token("token").await;
        ground.shared("starts");
        let mut field = Self { cluster, ground, token, all: Vec::new() };
        field.start_dispatcher();
        field
    }

    fn start_dispatcher(&mut self) {
        let config = self.cluster.config();
        // Long enough for every command of this test, and less than a minute.
        self.ground.start_slurm_dispatcher(&self.token, &config, &["--tag", TAG, "--lost-after", "15"]);
    }

    /// Kills the dispatcher and starts another one.
    fn replace_dispatcher(&mut self) {
        self.ground.kill_dispatchers();
        self.start_dispatcher();
    }

    fn file(&self, name: &str) -> PathBuf {
        self.ground.dir.join(name)
    }

    fn open(&self, gate: &str) {
        std::fs::write(self.file(gate), "").unwrap();
    }

    /// Submits a container and returns its index in `all`. Its program records that number and its process ID when it
    /// starts.
    async fn submit(&mut self, requirements: ContainerSpec<'_>) -> usize {
        let number = self.all.len();
        let starts = self.file("starts");
        // Limited, so that the remains of a failed test end by themselves.
        let waits = requirements.gate.map_or(String::new(), |gate| {
            let gate = self.file(gate);
            format!(
                "n=0; until [ -e {} ] || [ $n -ge 1500 ]; do n=$((n+1)); sleep 0.2; done; ",
                gate.display()
            )
        });
        let script = format!("echo {number} $$ >> {}; {waits}exit {}", starts.display(), requirements.exit);
        let scheduling = match requirements.place {
            NodeConstraint::Anywhere => json!({}),
            NodeConstraint::Partition(node) => json!({ "partitions": [format!("only-{node}")] }),
            NodeConstraint::Feature(node) => json!({ "features": [format!("on-{node}")] }),
        };
        let more = json!({
            "priority": requirements.priority, "scheduling_parameters": scheduling,
            "runtime_constraints": { "vcpus": requirements.cpus, "ram": requirements.memory_mib << 20 },
        });
        let requested = self.ground.request(&["sh", "-c", &script], more).await;
        self.all.push(SubmittedContainer { requested, exit: requirements.exit });
        number
    }

    /// Submits small and large containers of all priorities that end immediately, each with a different exit code.
    async fn submit_many(&mut self, count: u64) -> Vec<usize> {
        let mut crowd = Vec::new();
        for at in 0..count {
            let requirements = ContainerSpec {
                priority: 1 + at * 13 % 900,
                cpus: 1 + u32::try_from(at % 4).unwrap(),
                memory_mib: 50 + at * 97 % 1500,
                place: NodeConstraint::Anywhere,
                gate: None,
                exit: i64::try_from(at % 5).unwrap(),
            };
            crowd.push(self.submit(requirements).await);
        }
        crowd
    }

    fn uuid(&self, number: usize) -> &str {
        &self.all[number].requested.container
    }

    /// States of these containers.
    async fn states(&self, numbers: &[usize]) -> Vec<String> {
        let all = self.ground.containers().await;
        let state = |number: &usize| all[self.uuid(*number)]["state"].as_str().unwrap().to_owned();
        numbers.iter().map(state).collect()
    }

    /// Fails if no state changes for a while: a busy machine is slow, and makes progress.
    async fn wait_until(&self, what: &str, numbers: &[usize], is: impl Fn(&[String]) -> bool) {
        let mut since = Instant::now();
        let mut before = Vec::new();
        loop {
            let states = self.states(numbers).await;
            if is(&states) {
                return;
            }
            if states != before {
                since = Instant::now();
                before.clone_from(&states);
            }
            let jobs = || self.cluster.say("squeue", &["-t", "all"]);
            let nodes = || self.cluster.say("sinfo", &["-N"]);
            assert!(
                since.elapsed() < TIMEOUT,
                "{what}: {states:?}\n{}\n{}\n{}",
                jobs(),
                nodes(),
                self.ground.dispatcher_log()
            );
            tokio::time::sleep(POLL_INTERVAL).await;
        }
    }

    async fn wait_until_all(&self, numbers: &[usize], state: &str) {
        self.wait_until(&format!("not all are {state}"), numbers, |seen| seen.iter().all(|one| one == state))
            .await;
    }

    /// Active jobs of this test, by container.
    fn jobs(&self) -> BTreeMap<String, SqueueJob> {
        let listed = self.cluster.say("squeue", &["-h", "-o", "%j;%T;%y;%k"]);
        let ours = listed.lines().filter_map(|line| {
            let mut parts = line.splitn(4, ';');
            let (name, state, nice) = (parts.next()?, parts.next()?, parts.next()?.parse().ok()?);
            (parts.next() == Some(TAG)).then_some(())?;
            let (uuid, _) = name.rsplit_once('.')?;
            Some((uuid.to_owned(), SqueueJob { state: state.to_owned(), nice }))
        });
        ours.collect()
    }

    async fn wait_until_jobs(&self, what: &str, is: impl Fn(&BTreeMap<String, SqueueJob>) -> bool) {
        let since = Instant::now();
        while !is(&self.jobs()) {
            let seen = || self.cluster.say("squeue", &[]);
            assert!(since.elapsed() < TIMEOUT, "{what}\n{}\n{}", seen(), self.ground.dispatcher_log());
            tokio::time::sleep(POLL_INTERVAL).await;
        }
    }

    /// Number and process ID of every started program, in order.
    fn started(&self) -> Vec<(usize, i32)> {
        let text = std::fs::read_to_string(self.file("starts")).unwrap_or_default();
        let line = |line: &str| {
            let (number, pid) = line.split_once(' ')?;
            Some((number.parse().ok()?, pid.parse().ok()?))
        };
        text.lines().filter_map(line).collect()
    }

    async fn wait_until_dead(&self, numbers: &[usize]) {
        let since = Instant::now();
        let theirs: Vec<i32> = self
            .started()
            .into_iter()
            .filter(|(number, _)| numbers.contains(number))
            .map(|(_, pid)| pid)
            .collect();
        assert_eq!(theirs.len(), numbers.len());
        while theirs.iter().any(|pid| is_alive(*pid)) {
            assert!(since.elapsed() < TIMEOUT, "programs of a lost attempt go on: {theirs:?}");
            tokio::time::sleep(POLL_INTERVAL).await;
        }
    }

    fn executors(&self, number: usize) -> Vec<i32> {
        processes_matching(&[b"\0exec\0", self.uuid(number).as_bytes()])
    }

    async fn reason(&self, number: usize) -> String {
        let record = self.ground.client().get(&format!("containers/{}", self.uuid(number))).await.unwrap();
        record["runtime_status"]["reason"].as_str().unwrap_or_default().to_owned()
    }
}

/// A zombie does not count as alive.
fn is_alive(pid: i32) -> bool {
    let stat = std::fs::read_to_string(format!("/proc/{pid}/stat")).unwrap_or_default();
    stat.rsplit_once(") ").is_some_and(|(_, rest)| !rest.starts_with(['Z', 'X']))
}

#[tokio::test(flavor = "multi_thread")]
async fn two_hundred_containers_end_once_each_despite_dispatcher_executor_and_node_crashes() {
    let mut field = SlurmQueueEnv::start().await;
    let waits =
        |place| ContainerSpec { priority: 1_000, cpus: 1, memory_mib: 50, place, gate: Some("end"), exit: 0 };
    // One after the other on the first node: their start order shows whether priorities are applied.
    let first = field
        .submit(ContainerSpec { cpus: 4, gate: Some("line"), ..waits(NodeConstraint::Partition("n1")) })
        .await;
    let mut priorities: BTreeMap<usize, u64> = BTreeMap::new();
    for at in 0..30 {
        let priority = 100 + at * 7 % 30 * 20;
        let number = field
            .submit(ContainerSpec { priority, cpus: 4, gate: None, ..waits(NodeConstraint::Partition("n1")) })
            .await;
        priorities.insert(number, priority);
    }
    let line: Vec<usize> = priorities.keys().copied().collect();
    // Long-running ones: to the end, until they are cancelled, until their executor or their node dies.
    let mut stay = Vec::new();
    for node in ["n2", "n2", "n2", "n2", "n3", "n3", "n3", "n4", "n4"] {
        stay.push(field.submit(waits(NodeConstraint::Feature(node))).await);
    }
    let (to_the_end, cancelled) = (vec![stay[0], stay[1], stay[4]], vec![stay[2], stay[3], stay[5]]);
    let (crashed, lost) = (stay[6], vec![stay[7], stay[8]]);
    let early = field.submit_many(100).await;

    // The dispatcher dies during the submission.
    let all: Vec<usize> = (0..field.all.len()).collect();
    let is_in_progress = |seen: &[String]| seen.iter().filter(|state| *state != "Queued").count() >= 40;
    field.wait_until("nothing is taken", &all, is_in_progress).await;
    field.replace_dispatcher();
    field.wait_until_all(&[&stay[..], &[first]].concat(), "Running").await;
    field.wait_until_all(&line, "Locked").await;
    field
        .wait_until_jobs("not all wait in Slurm", |jobs| {
            line.iter().all(|one| jobs.contains_key(field.uuid(*one)))
        })
        .await;

    // Priorities change while containers wait, and three are set to zero. The dispatcher dies meanwhile.
    let unwanted = [line[1], line[4], line[7]];
    for (at, number) in line.iter().enumerate() {
        let priority = if unwanted.contains(number) { 0 } else { 105 + at as u64 * 11 % 30 * 20 };
        if priority == 0 || at % 3 == 0 {
            field.ground.weigh(&field.all[*number].requested, priority).await;
            priorities.insert(*number, priority);
        }
    }
    field.replace_dispatcher();
    field.wait_until_all(&unwanted, "Queued").await;
    let shows = |jobs: &BTreeMap<String, SqueueJob>, number: usize, priority: u64| match jobs
        .get(field.uuid(number))
    {
        Some(job) => job.state == "PENDING" && job.nice == (1_000 - priority) * NICE_STEP,
        None => priority == 0,
    };
    let all_follow = |jobs: &BTreeMap<String, SqueueJob>| {
        priorities.iter().all(|(number, priority)| shows(jobs, *number, *priority))
    };
    field.wait_until_jobs("a priority is not passed on", all_follow).await;

    // The controller is restarted while the waiting containers start.
    field.open("line");
    field.cluster.stop_controller();
    field.replace_dispatcher();
    field.cluster.start_controller();

    // A node dies with its containers, and their programs end although no process there could stop them.
    field.wait_until_all(&lost, "Running").await;
    field.cluster.kill_node(3);
    field.replace_dispatcher();
    field.wait_until_all(&lost, "Cancelled").await;
    field.wait_until_dead(&lost).await;
    field.cluster.start_node(3);
    let moved: Vec<usize> = line.iter().copied().filter(|one| !unwanted.contains(one)).collect();
    field.wait_until_all(&[&moved[..], &early[..], &[first]].concat(), "Complete").await;

    // The controller dies and loses unsaved state.
    let late = field.submit_many(60).await;
    let some_run = |seen: &[String]| seen.iter().filter(|state| *state == "Complete").count() >= 5;
    field.wait_until("the late ones do not run", &late, some_run).await;
    field.cluster.kill_controller();
    field.replace_dispatcher();
    field.cluster.start_controller();
    field
        .wait_until("the late ones do not end", &late, |seen| {
            seen.iter().all(|state| state == "Complete" || state == "Cancelled")
        })
        .await;

    // Some running ones are cancelled, and the executor of another is killed.
    for number in &cancelled {
        field.ground.weigh(&field.all[*number].requested, 0).await;
    }
    field.replace_dispatcher();
    field.wait_until_all(&cancelled, "Cancelled").await;
    for pid in field.executors(crashed) {
        Command::new("kill").args(["-KILL", &pid.to_string()]).status().unwrap();
    }
    field.replace_dispatcher();
    field.wait_until_all(&[crashed], "Cancelled").await;
    field.wait_until_dead(&[&cancelled[..], &[crashed]].concat()).await;

    // The remaining ones end.
    field.open("end");
    for number in unwanted {
        field.ground.delete_request(&field.all[number].requested).await;
    }
    field.wait_until_all(&to_the_end, "Complete").await;
    field.wait_until_all(&unwanted, "Cancelled").await;
    field.wait_until_jobs("something is left in Slurm", BTreeMap::is_empty).await;

    // Check the recorded history.
    assert_eq!(field.all.len(), 200);
    let started = field.started();
    let order: Vec<usize> =
        started.iter().map(|(number, _)| *number).filter(|one| moved.contains(one)).collect();
    let mut wanted = moved.clone();
    wanted.sort_by_key(|number| std::cmp::Reverse(priorities[number]));
    assert_eq!(order, wanted, "the order does not follow the priorities: {priorities:?}");
    let records = field.ground.containers().await;
    for (number, member) in field.all.iter().enumerate() {
        let record = &records[&member.requested.container];
        let times = started.iter().filter(|(one, _)| *one == number).count();
        if record["state"] == "Complete" {
            assert_eq!((times, record["exit_code"].as_i64()), (1, Some(member.exit)), "{number}: {record}");
        } else {
            assert!(times <= 1, "{number} ran {times} times: {record}");
        }
    }
    for number in &cancelled {
        assert_eq!(field.reason(*number).await, "priority_zero");
    }
    for number in &lost {
        assert_eq!(field.reason(*number).await, "node_lost");
    }
    assert_eq!(field.reason(crashed).await, "crashed");
    let survived = field.states(&late).await.iter().filter(|state| *state == "Complete").count();
    assert!(survived >= 30, "only {survived} of 60 survived a controller that forgets the last seconds");
    assert_eq!(find_violations(&field.ground.history().await, &records), [""; 0]);
    wait_until_clean(&field).await;
}

/// Waits until no executors, directories and control groups are left.
async fn wait_until_clean(field: &SlurmQueueEnv) {
    let since = Instant::now();
    loop {
        let mut left: Vec<String> = Vec::new();
        for member in &field.all {
            let uuid = member.requested.container.as_str();
            left.extend(
                processes_matching(&[b"\0exec\0", uuid.as_bytes()])
                    .iter()
                    .map(|pid| format!("{pid} for {uuid}")),
            );
        }
        for above in [std::env::temp_dir(), PathBuf::from("/sys/fs/cgroup")] {
            left.extend(directories_named_after(&above, field, 4));
        }
        if left.is_empty() {
            return;
        }
        assert!(since.elapsed() < TIMEOUT, "left behind: {left:#?}");
        tokio::time::sleep(POLL_INTERVAL).await;
    }
}

/// Directories named after one of these containers.
fn directories_named_after(above: &Path, field: &SlurmQueueEnv, depth: usize) -> Vec<String> {
    let mut found = Vec::new();
    for entry in std::fs::read_dir(above).into_iter().flatten().flatten() {
        let is_directory = entry.file_type().is_ok_and(|kind| kind.is_dir());
        let name = entry.file_name().to_string_lossy().into_owned();
        if !is_directory {
            continue;
        }
        if field.all.iter().any(|member| name.contains(&member.requested.container)) {
            found.push(entry.path().display().to_string());
        } else if depth > 1 && (name == "windlass" || name == "exec" || above.starts_with("/sys")) {
            found.extend(directories_named_after(&entry.path(), field, depth - 1));
        }
    }
    found
}

#[tokio::test]
async fn a_job_end_hook_wakes_the_dispatcher() {
    let cluster = SlurmCluster::start(&[SIZE]);
    let socket = cluster.dir().join("door.sock");
    let hook = WakeSocket::bind(&socket).unwrap();
    let windlass = binary_path("windlass").unwrap();
    cluster.at_the_end(&format!("exec {} dispatch knock {}", windlass.display(), socket.display()));
    let message = cluster.say("sbatch", &["--parsable", "--mem=10", "--output=/dev/null", "--wrap=true"]);
    assert!(message.trim().parse::<u32>().is_ok(), "{message}");
    tokio::time::timeout(TIMEOUT, hook.next()).await.expect("nobody knocked");
}

#[tokio::test(flavor = "multi_thread")]
async fn slurm_wait_reasons_are_shown_and_slurm_variables_reach_the_program() {
    let cluster = SlurmCluster::start(&[SIZE]);
    let mut ground = QueueEnv::start("reasons").await;
    let token = ground.token("token").await;
    ground.start_slurm_dispatcher(&token, &cluster.config(), &["--tag", TAG]);
    let go = ground.dir.join("go");
    let whole = json!({ "runtime_constraints": { "vcpus": 4, "ram": 64 << 20 } });
    let script = format!("until [ -e {} ]; do sleep 0.1; done", go.display());
    let first = ground.submit(&["sh", "-c", &script], whole.clone()).await;
    ground.until(&first, "the first one runs", |record| record["state"] == "Running").await;
    let second =
        ground.submit(&["sh", "-c", "echo $SLURM_JOB_ID:$SLURM_CPUS_PER_TASK:$SLURM_CONF"], whole).await;
    let reported = |record: &serde_json::Value| {
        record["runtime_status"]["activity"].as_str().is_some_and(|why| {
            why.starts_with("waits in the scheduler: ")
                && (why.contains("Resources") || why.contains("Priority"))
        })
    };
    ground.until(&second, "Slurm's reason is shown", reported).await;
    std::fs::write(go, "").unwrap();
    assert_eq!(ground.ended(&second).await["state"], "Complete");
    let message = String::from_utf8(ground.output(&second, "stdout").await).unwrap();
    let parts: Vec<&str> = message.trim().split(':').collect();
    assert!(parts[0].parse::<u32>().is_ok() && parts[1] == "4" && parts[2].is_empty(), "{message}");
    ground.kill_dispatchers();
}

#[tokio::test(flavor = "multi_thread")]
async fn an_sbatch_error_is_shown_verbatim_and_not_retried_at_once() {
    let cluster = SlurmCluster::start(&[SIZE]);
    let closed = cluster.say("scontrol", &["update", "PartitionName=main", "State=INACTIVE"]);
    let mut ground = QueueEnv::start("refused").await;
    let token = ground.token("token").await;
    ground.start_slurm_dispatcher(&token, &cluster.config(), &["--tag", TAG]);
    let uuid = ground.submit(&["true"], json!({})).await;
    let reported = |record: &serde_json::Value| {
        let why = record["scheduling_status"].as_str().unwrap_or_default();
        why.starts_with("the scheduler refused it: ") && why.contains("artition")
    };
    ground.until(&uuid, &format!("sbatch's words are shown ({closed})"), reported).await;
    let attempts = ground.until(&uuid, "they stay", reported).await["attempt"].clone();
    tokio::time::sleep(Duration::from_secs(5)).await;
    let record = ground.until(&uuid, "they stay", reported).await;
    assert_eq!((&record["state"], &record["attempt"]), (&json!("Queued"), &attempts), "{record}");
    assert_eq!(ground.messages(&uuid).await, ["decided_not_to_run"], "it is told once");
    ground.kill_dispatchers();
}
