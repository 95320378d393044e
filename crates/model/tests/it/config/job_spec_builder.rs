//! Derivation of jobs from runs, and the defaults in a plan.

use serde_json::{Value, json};
use windlass_model::config::{
    Configuration,
    effective::effective_run_spec,
    job_spec::JobSpec,
    job_spec_builder::{self, DefaultImages, Error, InheritedSpec, JobSpecInputs},
    references,
};
use windlass_model::resources::{CpuArch, GpuVendor};

use super::{accept, trimmed};

fn try_specs(text: &str) -> Result<Vec<JobSpec>, Error> {
    let configuration = accept(text);
    job_spec_builder::job_specs(&inputs(&configuration, &inherited()))
}

fn inputs<'a>(configuration: &'a Configuration, inherited: &'a InheritedSpec) -> JobSpecInputs<'a> {
    JobSpecInputs {
        run_name: "train-1",
        configuration,
        profile: None,
        inherited,
        server_url: Some("http://s"),
    }
}

fn inherited() -> InheritedSpec {
    let images = DefaultImages { docker: Some("dind:1".to_owned()), ..DefaultImages::default() };
    InheritedSpec { images, ..InheritedSpec::default() }
}

#[track_caller]
fn specs(text: &str) -> Vec<JobSpec> {
    try_specs(text).unwrap()
}

#[test]
fn a_task_becomes_one_job() {
    let text = "type: task\nimage: debian:12\nuser: root\ncommands: [python train.py]\nenv: {SEED: 7}\n\
                ports: [6006, 10999]\nmax_duration: 2h\nresources: {cpu: 'x86:4..', memory: 16GB.., gpu: 'H100:1'}";
    let json = serde_json::to_value(specs(text)).unwrap();
    let expected = json!([{
        "replica_num": 0, "job_num": 0, "job_name": "train-1-0-0", "jobs_per_replica": 1, "replica_group": "0",
        "node_group_index": 0, "node_group_name": "0", "node_group_job_index": 0,
        "app_specs": [{"port": 6006, "map_to_port": 6006, "app_name": "app_0"}], "user": {"username": "root"},
        "commands": ["/bin/sh", "-i", "-c", "python train.py"], "env": {"SEED": "7"}, "image_name": "debian:12",
        "privileged": false, "single_branch": true, "max_duration": 7200, "stop_duration": 300,
        "requirements": {"resources": {
            "cpu": {"arch": "x86", "count": {"min": 4}}, "memory": {"min": 16.0},
            "gpu": {"vendor": "nvidia", "name": ["H100"], "count": {"min": 1, "max": 1}},
            "disk": {"size": {"min": 100.0}}}, "spot": false, "multinode": false},
        "volumes": [], "repo_dir": "/workflow", "file_archives": [], "probes": [],
    }]);
    assert_eq!(trimmed(json.clone()), expected);
    let again: Vec<JobSpec> = serde_json::from_value(json).unwrap();
    assert_eq!(again, specs(text));
}

#[test]
fn every_node_is_a_job_with_its_own_volume() {
    let jobs =
        specs("type: task\nnodes: 2\ncommands: [x]\nvolumes: ['d-${{ dstack.node_rank }}:/d', '/h:/h']");
    let names: Vec<&str> = jobs.iter().map(|job| job.job_name.as_str()).collect();
    assert_eq!(names, ["train-1-0-0", "train-1-1-0"]);
    assert!(jobs.iter().all(|job| job.jobs_per_replica == 2 && job.requirements.multinode == Some(true)));
    let json = serde_json::to_value(&jobs[1].volumes).unwrap();
    assert_eq!(
        json,
        json!([{"name": ["d-1"], "path": "/d"}, {"instance_path": "/h", "path": "/h", "optional": false}])
    );
}

#[test]
fn node_group_jobs_are_numbered_consecutively_and_keep_their_group_settings() {
    let jobs = specs(
        "type: task\nimage: a\ngroups: [{name: head, commands: [h], ports: [1]}, {nodes: 2, commands: ['w ${{ groups[0].nodes[0].IP_ADDRESS }}'], resources: {cpu: 8}}]",
    );
    let at: Vec<_> = jobs
        .iter()
        .map(|j| (j.job_num, j.node_group_index, j.node_group_name.as_str(), j.node_group_job_index))
        .collect();
    assert_eq!(at, [(0, 0, "head", 0), (1, 1, "1", 0), (2, 1, "1", 1)]);
    assert_eq!((jobs[0].app_specs.len(), jobs[1].app_specs.len()), (1, 0));
    assert_eq!(jobs[2].requirements.resources.cpu.count.min, Some(8));
    assert_eq!(references::awaited_addresses(&jobs[1]).len(), 1);
    assert!(references::awaited_addresses(&jobs[0]).is_empty());
    let waiting = references::insert_addresses(&jobs[1].commands, |_, _| None);
    assert_eq!(waiting, jobs[1].commands);
    let ready = references::insert_addresses(&jobs[1].commands, |group, member| {
        Some(format!("10.{group}.{member}.1"))
    });
    assert_eq!(ready[3], "w 10.0.0.1");
}

#[test]
fn commands_are_joined_and_run_by_the_configured_shell_or_entrypoint() {
    let argv = |text: &str| specs(text)[0].commands.clone();
    assert_eq!(argv("type: task\ncommands: [a, b]"), ["/bin/bash", "-i", "-c", "a && b"]);
    assert_eq!(argv("type: task\nimage: i\ncommands: [a &, b]"), ["/bin/sh", "-i", "-c", "{ a & } && b"]);
    assert_eq!(argv("type: task\nimage: i\nshell: bash\ncommands: [a]")[0], "/bin/bash");
    assert_eq!(argv("type: task\nimage: i\nshell: /bin/zsh\ncommands: [a]")[0], "/bin/zsh");
    assert_eq!(
        argv("type: task\nimage: i\nentrypoint: run 'a b'\ncommands: [c, d e]"),
        ["run", "a b", "c", "d e"]
    );
    assert_eq!(specs("type: task\nimage: i")[0].commands, [""; 0], "the image may have a command");
    assert_eq!(try_specs("type: task\nimage: none").unwrap_err(), Error::NothingToRun);
    let open = try_specs("type: task\nimage: i\nentrypoint: \"run 'a\"").unwrap_err();
    assert!(matches!(open, Error::Entrypoint { .. }));
    assert_eq!(specs("type: task\nimage: scratch")[0].commands, [""; 0]);
}

#[test]
fn architectures_of_an_image_apply_to_the_jobs_that_run_in_it() {
    let mut inherited = inherited();
    inherited.image_architectures.insert("i".to_owned(), vec![CpuArch::Arm]);
    let jobs = |text: &str| job_spec_builder::job_specs(&inputs(&accept(text), &inherited)).unwrap();
    let job = jobs("type: task\nimage: i").remove(0);
    assert_eq!((job.image_architectures, job.commands), (vec![CpuArch::Arm], vec![]));
    // A request for an architecture is the user's alone.
    assert_eq!(job.requirements.resources.cpu.arch, None);
    let groups = "type: service\nport: 80\n\
                  groups: [{replicas: 1, image: i, commands: [x]}, {replicas: 1, image: other, commands: [x]}]";
    let built_for: Vec<usize> = jobs(groups).iter().map(|job| job.image_architectures.len()).collect();
    assert_eq!(built_for, [1, 0]);
}

#[test]
fn image_docker_and_nvcc_fields_select_the_image() {
    let job = |text: &str| specs(text).remove(0);
    let plain = job("type: task\ncommands: [x]\nresources: {cpu: arm, gpu: 1}");
    assert_eq!((plain.image_name.as_str(), plain.default_image), ("", None));
    assert_eq!(plain.requirements.resources.gpu.unwrap().vendor, None, "any vendor will do");
    let in_words = job("type: task\nimage: none\npython: '3.12'\ncommands: [x]");
    assert_eq!((in_words.image_name.as_str(), in_words.python.as_deref()), ("none", Some("3.12")));
    let docker = job("type: task\ndocker: true\ncommands: [x]");
    assert!(docker.privileged && docker.image_name == "dind:1");
    let nvcc = try_specs("type: task\nnvcc: true\ncommands: [x]").unwrap_err();
    assert_eq!(nvcc, Error::NoImageFor { field: "nvcc", setting: "nvcc-image" });
}

#[test]
fn default_image_comes_from_the_profile_or_else_from_the_server() {
    let images = DefaultImages { base: Some("server:1".to_owned()), ..DefaultImages::default() };
    let inherited = InheritedSpec { images, ..InheritedSpec::default() };
    let default_image = |text: &str| {
        let configuration = accept(text);
        job_spec_builder::job_specs(&inputs(&configuration, &inherited)).unwrap().remove(0).default_image
    };
    assert_eq!(default_image("type: task\ncommands: [x]").as_deref(), Some("server:1"));
    let of_project = inherited.images.with_project(Some("project:1"));
    assert_eq!(
        (of_project.base.as_deref(), of_project.docker),
        (Some("project:1"), inherited.images.docker.clone())
    );
    assert_eq!(inherited.images.with_project(None), inherited.images);
    let profile = "type: task\ndefault_image: profile:1\ncommands: [x]";
    assert_eq!(default_image(profile).as_deref(), Some("profile:1"));
    assert_eq!(default_image("type: task\nimage: i\ncommands: [x]"), None);
}

#[test]
fn vendors_are_inferred_from_names() {
    let infer = |names: &[&str]| {
        let names: Vec<String> = names.iter().map(|name| (*name).to_owned()).collect();
        job_spec_builder::infer_vendor(Some(&names))
    };
    assert_eq!(infer(&["H100", "a100"]), Some(GpuVendor::Nvidia));
    assert_eq!(infer(&["MI300X"]), Some(GpuVendor::Amd));
    assert_eq!(infer(&["v5litepod-8"]), Some(GpuVendor::Google));
    assert_eq!(infer(&["gaudi2"]), Some(GpuVendor::Intel));
    assert_eq!(infer(&["n300"]), Some(GpuVendor::Tenstorrent));
    assert_eq!(infer(&["H100", "MI300X"]), None);
    assert_eq!(infer(&["Foo"]), None);
    assert_eq!(infer(&[]), None);
    assert_eq!(job_spec_builder::infer_vendor(None), None);
}

#[test]
fn a_service_starts_with_its_minimum_number_of_replicas() {
    let text = "type: service\nport: 80:8000\ncommands: [x]\nreplicas: 2..4\nscaling: {metric: rps, target: 1}\nmodel: m";
    let jobs = specs(text);
    let names: Vec<&str> = jobs.iter().map(|job| job.job_name.as_str()).collect();
    assert_eq!(names, ["train-1-0-0", "train-1-0-1"]);
    assert_eq!((jobs[0].service_port, jobs[0].app_specs.len()), (Some(8000), 0));
    assert_eq!(jobs[0].probes[0].url, "/v1/chat/completions");
    let idle = accept(&text.replace("2..4", "0..4"));
    let inherited = InheritedSpec::default();
    let inputs = inputs(&idle, &inherited);
    assert!(job_spec_builder::job_specs(&inputs).unwrap().is_empty());
    assert_eq!(job_spec_builder::plan_specs(&inputs).unwrap().len(), 1);
    assert_eq!(job_spec_builder::replica_specs(&inputs, 0, 7).unwrap()[0].job_name, "train-1-0-7");
    assert_eq!(job_spec_builder::replica_specs(&inputs, 0, 7).unwrap()[0].replica_num, 7);
}

#[test]
fn replica_group_settings_override_those_of_the_service() {
    let jobs = specs(
        "type: service\nport: 1\nspot_policy: spot\ngroups: [{name: router, count: 1, docker: true, commands: [r]}, {replicas: 2, image: i, privileged: true, commands: [w]}]",
    );
    let groups: Vec<_> = jobs
        .iter()
        .map(|job| (job.replica_num, job.replica_group.as_str(), job.image_name.as_str()))
        .collect();
    assert_eq!(groups, [(0, "router", "dind:1"), (1, "1", "i"), (2, "1", "i")]);
    assert!(jobs.iter().all(|job| job.privileged && job.requirements.spot == Some(true)));
    let jobs = specs(
        "type: service\nport: 1\ngroups: [{replicas: 1, commands: [a]}, {replicas: 1, \
         commands: [b], resources: {cpu: 8}, spot_policy: on-demand, reservation: own, python: '3.12'}]",
    );
    let limits: Vec<_> = jobs
        .iter()
        .map(|job| {
            let requested = &job.requirements;
            let (cpus, reserved) = (requested.resources.cpu.count.min, requested.reservation.as_deref());
            (cpus, requested.spot, reserved, job.python.as_deref())
        })
        .collect();
    let own = (Some(8), Some(false), Some("own"), Some("3.12"));
    assert_eq!(limits, [(Some(2), Some(false), None, None), own]);
}

#[test]
fn probe_and_retry_defaults_are_filled_in() {
    let job = &specs(
        "type: service\nport: 1\nimage: i\ncommands: [x]\nmodel: m\nprobes: [{type: http}]\nretry: true\nstop_duration: off\nspot_policy: auto",
    )[0];
    let json = serde_json::to_value(job).unwrap();
    assert_eq!(
        trimmed(json["probes"][0].clone()),
        json!({"type": "http", "url": "/", "method": "get", "headers": [], "timeout": 10, "interval": 15, "ready_after": 1, "until_ready": false})
    );
    assert_eq!(
        json["retry"],
        json!({"on_events": ["no-capacity", "interruption", "error"], "duration": 3600})
    );
    assert_eq!((&json["stop_duration"], &json["requirements"]["spot"]), (&Value::Null, &Value::Null));
    assert!(
        specs("type: service\nport: 1\nimage: i\ncommands: [x]\nmodel: m\nprobes: []")[0].probes.is_empty()
    );
    assert!(specs("type: task\ncommands: [x]\nretry: false")[0].retry.is_none());
    let policy = &specs("type: task\ncommands: [x]\nretry: {duration: 4h}")[0];
    assert_eq!(policy.retry.as_ref().map(|retry| (retry.on_events.len(), retry.duration)), Some((3, 14400)));
}

#[test]
fn a_variable_without_a_value_stops_the_run() {
    let error = try_specs("type: task\ncommands: [x]\nenv: [TOKEN]").unwrap_err();
    assert_eq!(error, Error::UnresolvedVariable { name: "TOKEN".to_owned() });
    let mut configuration = accept("type: task\ncommands: [x]\nenv: [TOKEN, A=1]\ndstack: true");
    configuration.run_mut().unwrap().env.resolve(|name| (name == "TOKEN").then(|| "t".to_owned()));
    let inherited = InheritedSpec::default();
    let job = job_spec_builder::job_specs(&inputs(&configuration, &inherited)).unwrap().remove(0);
    assert_eq!(
        serde_json::to_value(&job.env).unwrap(),
        json!({"A": "1", "DSTACK_SERVER_URL": "http://s", "TOKEN": "t"})
    );
}

#[test]
fn a_dev_environment_keeps_running_after_its_init_commands() {
    let job = &specs(
        "type: dev-environment\nide: vscode\nsetup: [s]\ninit: [i]\nports: [8080]\nrepos: ['..:/repo']",
    )[0];
    assert!(job.commands[3].starts_with("s && i && ") && job.commands[3].ends_with("tail -f /dev/null"));
    assert_eq!((job.single_branch, job.repo_dir.as_str()), (Some(false), "/repo"));
    assert_eq!(job.app_specs.len(), 1);
}

#[test]
fn a_fleet_has_no_jobs() {
    assert_eq!(try_specs("type: fleet\nnodes: 1").unwrap_err(), Error::NotARun { kind: "fleet" });
}

#[test]
fn effective_spec_adds_defaults_and_changes_nothing_else() {
    let sent = json!({"run_name": "train-1", "repo_id": null, "unheard_of": [1], "configuration": {
        "type": "task", "image": "debian:12", "commands": ["x"], "priority": null,
        "resources": {"gpu": {"name": ["H100"], "count": {"min": 1, "max": 1}}, "cpu": {"count": {"min": 4}}}}});
    let mut expected = sent.clone();
    expected["repo_id"] = json!("none");
    expected["repo_data"] = json!({"repo_type": "virtual"});
    expected["configuration"]["priority"] = json!(0);
    expected["configuration"]["nodes"] = json!(1);
    expected["configuration"]["resources"]["gpu"]["vendor"] = json!("nvidia");
    assert_eq!(effective_run_spec(&sent), expected);
    assert_eq!(effective_run_spec(&expected), expected);
    let grouped =
        json!({"configuration": {"type": "task", "groups": [{"resources": {"gpu": {"name": ["L4"]}}}]}});
    let shown = effective_run_spec(&grouped);
    assert!(shown["configuration"].get("nodes").is_none());
    assert_eq!(shown["configuration"]["groups"][0]["resources"]["gpu"]["vendor"], "nvidia");
    let amd = json!({"configuration": {"type": "service", "image": "i", "resources": {"gpu": {"count": {"min": 0}}}}});
    assert!(effective_run_spec(&amd)["configuration"]["resources"]["gpu"].get("vendor").is_none());
    assert_eq!(effective_run_spec(&json!(null)), json!(null));
}

#[test]
fn the_client_resolves_arguments_and_environment_references() {
    let mut service = accept(
        "type: service\nport: 1\nimage: i\nenv: [TOKEN, A=1]\ncommands: ['x ${{ run.args }} $$HOME ${{ secrets.S }}']\n\
         registry_auth: {username: '${{ env.A }}', password: '${{ secrets.P }}'}\n\
         probes: [{type: http, method: post, url: '/${{ env.A }}', body: '${{ env.TOKEN }}', headers: [{name: K, value: '${{ env.A }}'}]}]",
    );
    let args = ["a b".to_owned(), "--fast".to_owned()];
    let unset = references::resolve_for_client(&mut service.clone(), &args, |_| None).unwrap_err();
    assert_eq!(unset, references::Error::Unset { names: vec!["TOKEN".to_owned()] });
    references::resolve_for_client(&mut service, &args, |_| Some("${{ env.A }}".to_owned())).unwrap();
    let json = serde_json::to_value(&service).unwrap();
    assert_eq!(json["commands"], json!(["x 'a b' --fast $HOME ${{ secrets.S }}"]));
    assert_eq!(json["registry_auth"], json!({"username": "1", "password": "${{ secrets.P }}"}));
    let probe = &json["probes"][0];
    assert_eq!(
        (&probe["url"], &probe["body"], &probe["headers"][0]["value"]),
        (&json!("/1"), &json!("${{ env.A }}"), &json!("1"))
    );
    let mut task = accept(
        "type: task\nimage: i\nregistry_auth: {username: '${{ env.NOPE }}', password: p}\ncommands: [x]",
    );
    assert!(matches!(
        references::resolve_for_client(&mut task, &[], |_| None),
        Err(references::Error::Reference { .. })
    ));
    let mut grouped = accept(
        "type: task\ngroups: [{commands: ['x ${{ run.args }}', 'y ${{ groups[0].nodes[0].IP_ADDRESS }}']}]",
    );
    references::resolve_for_client(&mut grouped, &args, |_| None).unwrap();
    let json = serde_json::to_value(&grouped).unwrap();
    assert_eq!(
        json["groups"][0]["commands"],
        json!(["x 'a b' --fast", "y ${{ groups[0].nodes[0].IP_ADDRESS }}"])
    );
}

#[test]
fn secrets_are_inserted_once_and_missing_ones_are_named() {
    let text = "type: task\nimage: i\ncommands: ['echo ${{ secrets.A }}']\nenv: {X: 'a-${{ secrets.A }}', Y: plain $$ text}\n\
                registry_auth: {username: u, password: '${{ secrets.B }}'}";
    let mut spec = specs(text).remove(0);
    let missing = references::insert_secrets(&mut spec.clone(), |_| None).unwrap_err();
    assert_eq!(missing.to_string(), "secrets that do not exist: A, B");
    references::insert_secrets(&mut spec, |name| Some(format!("<{name}> ${{{{ secrets.B }}}}"))).unwrap();
    assert_eq!(spec.env["X"], "a-<A> ${{ secrets.B }}");
    assert_eq!(spec.env["Y"], "plain $$ text");
    assert_eq!(spec.registry_auth.unwrap().password, "<B> ${{ secrets.B }}");
    assert_eq!(spec.commands[3], "echo ${{ secrets.A }}", "a shell gets secrets through its environment");
}

#[test]
fn a_gateway_serves_each_project_at_its_own_domain() {
    assert_eq!(references::gateway_domain("${{ run.project_name }}.x.org", "lab").unwrap(), "lab.x.org");
    assert!(references::gateway_domain("${{ run.args }}.x.org", "lab").is_err());
}
