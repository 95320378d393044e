use tokio::{
    io::{AsyncReadExt as _, AsyncWriteExt as _},
    net::UnixListener,
};
use windlass_testkit::{TempDir, temp_dir};

use super::*;

fn local(dir: &TempDir, runtime: Option<Runtime>) -> LocalBackend {
    LocalBackend::new(Settings {
        home: dir.path().join("local"),
        runtime,
        docker_socket: Some(dir.path().join("engine.sock")),
        ..Settings::default()
    })
}

/// Engine that answers every request with OK, until it is aborted.
fn engine(dir: &TempDir) -> tokio::task::JoinHandle<()> {
    let path = dir.path().join("engine.sock");
    let _ = std::fs::remove_file(&path);
    let listener = UnixListener::bind(path).unwrap();
    tokio::spawn(async move {
        while let Ok((mut stream, _)) = listener.accept().await {
            let mut requested = [0; 37];
            let _ = stream.read_exact(&mut requested).await;
            let _ = stream.write_all(b"HTTP/1.0 200 OK\r\n\r\nOK").await;
        }
    })
}

fn machine(local: &LocalBackend, chosen: &SelectedRuntime) -> BackendInstance {
    let memo = LocalState {
        home: local.home().dir().to_owned(),
        host: hostname(),
        message: chosen.message.clone(),
        engine_away: chosen.engine_away.clone(),
    };
    let info = HostInfo { gpu_vendor: "none".into(), cpus: 1, ..HostInfo::default() };
    BackendInstance {
        id: hostname(),
        reach: None,
        hostname: None,
        internal_ip: None,
        has: Some(has(&info, chosen)),
        agent_version: None,
        memo: json!(memo),
    }
}

#[tokio::test]
async fn a_known_engine_that_stops_is_awaited_and_an_engine_that_appears_is_used() {
    let dir = temp_dir("engine").unwrap();
    let local = local(&dir, None);
    let home = local.home();
    std::fs::create_dir_all(home.dir()).unwrap();
    let none = local.select_runtime(&home).await.unwrap();
    // The settings name its socket, so jobs with an image wait for it.
    assert_eq!((none.runtime, none.hardware_info()), (Runtime::Process, Runtime::Any), "{none:?}");
    assert!(none.engine_away.as_ref().unwrap().contains("no Docker engine at"), "{none:?}");
    local.remember_engine(&home, &none);
    assert!(!had_engine(&home), "without the setting, the machine has no engine");
    let bare = machine(&local, &none);
    assert!(!local.is_outdated(&bare).await);

    // It starts late: the instance runs containers from then on.
    let running = engine(&dir);
    assert!(local.is_outdated(&bare).await);
    let with = local.select_runtime(&home).await.unwrap();
    assert_eq!((with.runtime, with.hardware_info(), &with.engine_away), (Runtime::Any, Runtime::Any, &None));
    local.remember_engine(&home, &with);
    let served = machine(&local, &with);
    assert!(!local.is_outdated(&served).await);

    // It stops: jobs with an image wait, and nothing is lost.
    running.abort();
    let _ = running.await;
    std::fs::remove_file(dir.path().join("engine.sock")).unwrap();
    assert!(local.is_outdated(&served).await);
    let away = local.select_runtime(&home).await.unwrap();
    assert_eq!((away.runtime, away.hardware_info()), (Runtime::Process, Runtime::Any), "{away:?}");
    assert!(away.engine_away.as_ref().unwrap().contains("no Docker engine at"), "{away:?}");
    local.remember_engine(&home, &away);
    let waits = machine(&local, &away);
    assert!(!local.is_outdated(&waits).await);
    assert_eq!(waits.has.as_ref().unwrap().runtime, "any");

    // It is back.
    let _running = engine(&dir);
    assert!(local.is_outdated(&waits).await);
    assert_eq!(local.select_runtime(&home).await.unwrap().runtime, Runtime::Any);
}

#[tokio::test]
async fn a_machine_without_an_engine_runs_containers_if_its_agent_can() {
    let oci = |text: &str| {
        let host = json!({"gpu_vendor": "none", "gpu_name": "", "gpu_memory": 0, "gpu_count": 0, "addresses": [],
            "disk_size": 0, "cpus": 1, "memory": 0});
        let report = format!(r#"{{"host": {host}{text}}}"#);
        runtime_without_engine(serde_json::from_str::<HostReport>(&report).unwrap().oci.as_ref())
    };
    assert_eq!(oci(r#", "oci": {"available": true}"#), Runtime::AnyOci);
    assert_eq!(oci(r#", "oci": {"available": false, "problem": "no `runc`"}"#), Runtime::Process);
    assert_eq!(oci(""), Runtime::Process, "an older agent");

    let dir = temp_dir("engine").unwrap();
    let local = local(&dir, Some(Runtime::AnyOci));
    let _running = engine(&dir);
    let chosen = local.select_runtime(&local.home()).await.unwrap();
    assert_eq!((chosen.runtime, chosen.docker_socket), (Runtime::AnyOci, None), "as configured");
    assert!(!had_engine(&local.home()));
}

#[tokio::test]
async fn a_configured_container_runtime_never_falls_back_to_plain_processes() {
    let dir = temp_dir("engine").unwrap();
    for runtime in [Runtime::Docker, Runtime::Any] {
        let local = local(&dir, Some(runtime));
        let error = local.select_runtime(&local.home()).await.unwrap_err();
        assert!(matches!(error, BackendError::Unavailable { .. }), "{error}");
    }
}
