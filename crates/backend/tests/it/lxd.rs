//! LXD as a backend, with a real LXD server: needs root and the image that `cargo xtask test` builds.

use std::{collections::BTreeMap, process::Command, sync::Arc};

use serde_json::json;
use windlass_backend::{
    AgentEndpoint, Backend, BackendError, DeleteProgress, InstanceRequest, InstanceState,
    conformance::check_backend,
    lxd::{LxdProvider, Settings, machine_name},
    machines::{MachineBackend, MachineProvider as _, address_of},
    remote::{AgentBinaries, RemoteBackend},
    volumes::{AttachmentState, VolumeRequest},
};
use windlass_model::id::VolumeId;
use windlass_testkit::{lxd::LxdServer, ports::reserve_free_port, temp_dir, wait::eventually_ok_async};
use windlass_tunnel::{Backoff, LoginKey, SshPool};

use crate::support::{agent, order, uuid};

fn settings(url: &str, more: serde_json::Value) -> Settings {
    let mut all = json!({
        "url": url, "image": windlass_testkit::lxd::IMAGE, "region": "lab",
        "config": {"security.nesting": true},
        "capacity": {"cpus": 4, "memory": "4GB"},
        "instance_types": [{"name": "small", "cpus": 1, "memory": "512MB", "price": 0.25}],
    });
    all.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
    let settings: Settings = serde_json::from_value(all).unwrap();
    settings.validated().unwrap()
}

fn provider(lxd: &LxdServer, more: serde_json::Value) -> LxdProvider {
    LxdProvider::new(settings(&lxd.url(), more)).unwrap()
}

/// Opens the backend as a new server would.
fn open(lxd: &LxdServer, more: serde_json::Value) -> Arc<dyn Backend> {
    let hosts = Arc::new(SshPool::new(Backoff::STANDARD));
    let remote = RemoteBackend::new(hosts, AgentBinaries::next_to(agent().path()));
    Arc::new(MachineBackend::new(provider(lxd, more), Arc::new(remote)))
}

fn login_key() -> LoginKey {
    let dir = temp_dir("key").unwrap();
    let path = dir.path().join("key");
    let made = Command::new("ssh-keygen").args(["-q", "-t", "ed25519", "-N", "", "-f"]).arg(&path).status();
    assert!(made.unwrap().success());
    LoginKey::parse(&std::fs::read_to_string(path).unwrap()).unwrap()
}

async fn lxd_order(backend: &dyn Backend) -> InstanceRequest {
    let tags = BTreeMap::from([("team".to_owned(), "ml".to_owned())]);
    InstanceRequest { login: Some(login_key()), tags, ..order(backend, 1).await }
}

#[tokio::test]
async fn lxd_passes_the_conformance_checks_and_no_machine_is_left() {
    let lxd = LxdServer::start();
    let open = || open(&lxd, json!({}));
    let order = lxd_order(&*open()).await;
    check_backend(&open, &order).await;
    assert_eq!(lxd.instances(), Vec::<String>::new());
}

#[tokio::test]
async fn an_lxd_machine_has_the_limits_of_its_offer_and_names_its_instance_and_its_host_key_is_pinned() {
    let lxd = LxdServer::start();
    let backend = open(&lxd, json!({}));
    let order = lxd_order(&*backend).await;
    let mut machine = backend.create(&order).await.unwrap();
    assert_eq!(machine.id, machine_name(order.instance));
    let found = loop {
        match backend.find(&order, &machine).await.unwrap() {
            InstanceState::Running(found) => break found,
            InstanceState::Starting(found) => machine = found,
            other @ (InstanceState::Gone { .. } | InstanceState::Unknown) => panic!("{other:?}"),
        }
    };
    assert!(matches!(found.reach, Some(AgentEndpoint::Ssh { .. })), "{found:?}");
    let has = found.has.clone().unwrap();
    assert_eq!((has.cpus, has.memory_mib), (1, 512), "not the hardware of the host: {has:?}");
    let address = address_of(&found).unwrap();
    let key = lxd.run(["exec", &machine.id, "--", "cat", "/etc/ssh/ssh_host_ed25519_key.pub"]);
    assert!(key.starts_with(address.host_key.as_deref().unwrap()), "{key} {address:?}");
    let of = |key: &str| lxd.run(["config", "get", &machine.id, key]).trim().to_owned();
    assert_eq!(of("user.windlass-instance"), order.instance.to_string());
    assert_eq!(of("user.windlass-tag.team"), "ml");
    assert_eq!((of("limits.cpu"), of("limits.memory")), ("1".to_owned(), "512MiB".to_owned()));
    let script = of("user.user-data");
    assert!(!script.contains(&order.enrolment.credential_sha256) && !script.contains("PRIVATE"), "{script}");
    let listed = provider(&lxd, json!({})).list().await.unwrap();
    assert_eq!(listed, [(machine.id.clone(), order.instance.to_string())]);

    // Its owner replaces its key: the one that LXD reports is the new one, so the machine is used again.
    lxd.run([
        "exec",
        &machine.id,
        "--",
        "sh",
        "-c",
        "rm /etc/ssh/ssh_host_*; ssh-keygen -q -A; systemctl restart ssh",
    ]);
    let again = eventually_ok_async("the machine is reached with its new key", async || {
        match self::open(&lxd, json!({})).find(&order, &found).await {
            Ok(InstanceState::Running(again)) => Ok(again),
            other => Err(format!("{other:?}")),
        }
    })
    .await;
    assert_ne!(address_of(&again).unwrap().host_key, address.host_key);

    // Stopped by hand: it is started again.
    lxd.run(["stop", "--force", &machine.id]);
    // The SSH server may not respond yet.
    let _ = backend.find(&order, &found).await;
    assert_eq!(lxd.run(["list", &machine.id, "--format", "csv", "-c", "s"]).trim(), "RUNNING");
    lxd.run(["delete", "--force", &machine.id]);
    let gone = backend.find(&order, &found).await.unwrap();
    assert!(
        matches!(&gone, InstanceState::Gone { message } if message.contains("no longer exists")),
        "{gone:?}"
    );
    assert_eq!(backend.delete(&order, Some(&found)).await.unwrap(), DeleteProgress::Gone);
}

#[tokio::test]
async fn errors_of_lxd_say_whether_another_attempt_helps() {
    let lxd = LxdServer::start();
    // A full host is a lack of capacity: the next offer may fit.
    let full = open(&lxd, json!({"capacity": {"instances": 0}}));
    assert_eq!(full.offers().await.unwrap()[0].availability.as_str(), "not available");
    let order = lxd_order(&*full).await;
    let error = full.create(&order).await.unwrap_err();
    assert!(
        matches!(error, BackendError::NoCapacity { .. }) && error.to_string().contains("0 of 0"),
        "{error}"
    );
    // Wrong settings are refused.
    let wrong = open(&lxd, json!({"image": "nothing"})).create(&order).await.unwrap_err();
    assert!(matches!(wrong, BackendError::Refused { .. }), "{wrong}");
    let wrong = open(&lxd, json!({"profiles": ["none"]})).create(&order).await.unwrap_err();
    assert!(matches!(wrong, BackendError::Refused { .. }), "{wrong}");
    // What another person created is left alone.
    let name = machine_name(order.instance);
    lxd.run(["init", "--empty", &name]);
    let foreign = open(&lxd, json!({})).create(&order).await.unwrap_err();
    assert!(foreign.to_string().contains("windlass did not create it"), "{foreign}");
    assert_eq!(open(&lxd, json!({})).delete(&order, None).await.unwrap(), DeleteProgress::Gone);
    assert_eq!(lxd.instances(), [name]);
    // No answer: the request may be repeated.
    let nowhere = LxdProvider::new(settings("unix:///nonexistent/socket", json!({}))).unwrap();
    let error = nowhere.list().await.unwrap_err();
    assert!(matches!(error, BackendError::Unavailable { .. }), "{error}");
}

#[tokio::test]
async fn lxd_is_reached_over_https_with_a_client_certificate_that_it_trusts() {
    let lxd = LxdServer::start();
    let (url, server_certificate) = lxd.listen(reserve_free_port());
    let dir = temp_dir("client").unwrap();
    let (certificate, key) = (dir.path().join("client.crt"), dir.path().join("client.key"));
    let made = Command::new("openssl")
        .args([
            "req",
            "-x509",
            "-newkey",
            "ec",
            "-pkeyopt",
            "ec_paramgen_curve:prime256v1",
            "-nodes",
            "-days",
            "2",
        ])
        .args(["-subj", "/CN=windlass", "-keyout"])
        .arg(&key)
        .arg("-out")
        .arg(&certificate)
        .output();
    assert!(made.unwrap().status.success());
    let more = json!({"server_certificate": server_certificate, "client_certificate": certificate, "client_key": key});
    let over_https = || LxdProvider::new(settings(&url, more.clone())).unwrap();
    let untrusted = over_https().check().await;
    assert!(untrusted[0].problem.as_ref().is_some_and(|text| text.contains("trust add")), "{untrusted:?}");
    let refused = over_https().list().await.unwrap_err();
    assert!(
        matches!(refused, BackendError::Refused { .. }) && refused.to_string().contains("trusts"),
        "{refused}"
    );
    lxd.run(["config", "trust", "add", certificate.to_str().unwrap()]);
    assert_eq!(over_https().list().await.unwrap(), []);
    assert!(over_https().check().await.iter().all(|finding| finding.problem.is_none()));
    // Another server at the same address is not trusted.
    let mut forged = more.clone();
    forged["server_certificate"] = json!(certificate);
    let error = LxdProvider::new(settings(&url, forged)).unwrap().list().await.unwrap_err();
    assert!(
        matches!(error, BackendError::Unavailable { .. }) && error.to_string().contains("TLS"),
        "{error}"
    );
}

#[tokio::test]
async fn a_check_of_lxd_names_what_is_missing() {
    let lxd = LxdServer::start();
    let problems = async |more: serde_json::Value| -> Vec<String> {
        let findings = open(&lxd, more).check().await;
        findings.into_iter().filter_map(|one| Some(format!("{}: {}", one.what, one.problem?))).collect()
    };
    assert_eq!(problems(json!({})).await, Vec::<String>::new());
    let missing = problems(json!({"image": "nothing", "storage_pool": "none"})).await.join("\n");
    assert!(missing.contains("image `nothing`: it does not exist; hint: `lxc image copy"), "{missing}");
    assert!(missing.contains("storage pool `none`: it does not exist"), "{missing}");
    lxd.run(["profile", "create", "bare"]);
    let missing = problems(json!({"profiles": ["bare"]})).await.join("\n");
    assert!(missing.contains("no root disk and no network interface"), "{missing}");
    let nowhere = LxdProvider::new(settings("unix:///nonexistent/socket", json!({}))).unwrap();
    let nowhere = nowhere.check().await;
    assert!(
        nowhere.len() == 1 && nowhere[0].problem.as_ref().unwrap().contains("/nonexistent/socket"),
        "{nowhere:?}"
    );
}

#[tokio::test]
async fn an_lxd_volume_keeps_its_files_from_one_machine_to_the_next() {
    let lxd = LxdServer::start();
    let backend = open(&lxd, json!({}));
    let volumes = backend.volumes().unwrap();
    let wanted = VolumeRequest {
        volume: VolumeId(uuid()),
        name: "data".into(),
        region: "lab".into(),
        zone: None,
        size_gb: Some(0.5),
        external: None,
    };
    let elsewhere = VolumeRequest { region: "moon".into(), ..wanted.clone() };
    let error = volumes.make(&elsewhere).await.unwrap_err();
    assert!(error.to_string().contains("this backend has `lab`"), "{error}");
    let made = volumes.make(&wanted).await.unwrap();
    assert_eq!(made, volumes.make(&wanted).await.unwrap(), "a repeat finds the same");
    assert_eq!((made.size_gb, made.ready), (Some(0.5), true));
    let mut machines = Vec::new();
    for _ in 0..2 {
        let order = lxd_order(&*backend).await;
        let machine = backend.create(&order).await.unwrap();
        machines.push((order, machine));
    }
    let (one, two) = (&machines[0].1, &machines[1].1);
    let AttachmentState::Yes(at) = volumes.attach(&made.id, one).await.unwrap() else { panic!() };
    let path = at.device_name.clone().unwrap();
    assert_eq!(volumes.attach(&made.id, one).await.unwrap(), AttachmentState::Yes(at.clone()), "a repeat");
    assert_eq!(volumes.attached(&made.id, one).await.unwrap(), AttachmentState::Yes(at));
    let busy = volumes.attach(&made.id, two).await.unwrap_err();
    assert!(busy.to_string().contains("is attached to"), "{busy}");
    let busy = volumes.remove(&wanted, &made.id).await.unwrap_err();
    assert!(busy.to_string().contains("still attached"), "{busy}");
    lxd.run(["exec", &one.id, "--", "sh", "-c", &format!("echo kept > {path}/file")]);
    volumes.detach(&made.id, one, false).await.unwrap();
    volumes.detach(&made.id, one, false).await.unwrap();
    assert_eq!(volumes.attached(&made.id, one).await.unwrap(), AttachmentState::No);
    volumes.attach(&made.id, two).await.unwrap();
    assert_eq!(lxd.run(["exec", &two.id, "--", "cat", &format!("{path}/file")]), "kept\n");
    for (order, machine) in &machines {
        assert_eq!(backend.delete(order, Some(machine)).await.unwrap(), DeleteProgress::Gone);
    }
    assert_eq!(volumes.attached(&made.id, two).await.unwrap(), AttachmentState::No);
    volumes.remove(&wanted, &made.id).await.unwrap();
    volumes.remove(&wanted, &made.id).await.unwrap();
    assert_eq!(volumes.get(&wanted, &made.id).await.unwrap(), None);
}
