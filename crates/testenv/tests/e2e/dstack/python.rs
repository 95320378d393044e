//! `dstack.api`, the Python client library.

use windlass_testkit::cli_snapshot::run_command;

use super::dstack_user::DstackUser;
use crate::test_env::{HostMode, TestEnv};

const SCRIPT: &str = r#"
import pathlib, time
from dstack.api import Client, Resources, Task

client = Client.from_config()
go = pathlib.Path("go").resolve()

def task(name):
    wait = f"until [ -e {go} ]; do sleep 0.1; done"
    return Task(name=name, image="none", user="root", commands=["echo up", wait, "echo down"], ports=["*:7007"],
                resources=Resources(cpu="1..", memory="0..", disk=None))

def ended(run):
    for _ in range(600):
        run.refresh()
        if run.status.is_finished():
            return run.status.value
        time.sleep(0.1)

plan = client.runs.get_run_plan(task("programmed"))
print("offers:", len(plan.job_plans[0].offers), plan.action.value)

run = client.runs.apply_configuration(task("programmed"))
print("submitted:", run.name)
print("attached:", run.attach(), sorted(run.ports))
output = b""
for piece in run.logs():
    output += piece
    if b"up" in output:
        go.touch()
print("followed:", output.decode().split())
run.detach()
print("ended:", ended(run))
print("logs:", b"".join(run.logs()).decode().split())

go.unlink()
for name, abort in ("stopped", False), ("aborted", True):
    run = client.runs.apply_configuration(task(name), reserve_ports=False)
    while b"up" not in b"".join(run.logs()):
        time.sleep(0.1)
        run.refresh()
    print("listed:", sorted(run.name for run in client.runs.list()))
    run.stop(abort=abort)
    print("ended:", ended(run))
print("absent:", client.runs.get("nothing"))
print("all:", sorted((run.name, run.status.value) for run in client.runs.list(all=True)))
"#;

const MESSAGE: &str = "\
offers: 1 create
submitted: programmed
attached: True [7007, 10999]
followed: ['up', 'down']
ended: done
logs: ['up', 'down']
listed: ['stopped']
ended: terminated
listed: ['aborted']
ended: terminated
absent: None
all: [('aborted', 'terminated'), ('programmed', 'done'), ('stopped', 'terminated')]
";

#[tokio::test(flavor = "multi_thread")]
async fn dstack_python_api_submits_attaches_reads_logs_and_stops() {
    let env = TestEnv::new(HostMode::Processes).await;
    let person = DstackUser::with_project(&env);
    person.wait_for_host();
    person.file("program.py", SCRIPT);
    let done = run_command(person.program("python").arg("program.py"));
    assert_eq!((done.stdout.as_str(), done.code), (MESSAGE, Some(0)), "{}", done.stderr);
}
