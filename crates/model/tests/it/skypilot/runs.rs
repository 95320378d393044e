//! Conversion of a task to a run that an unchanged server accepts.

use windlass_model::{
    config::{
        Configuration,
        job_spec_builder::{self, InheritedSpec, JobSpecInputs},
        profile::{BackendType, SpotPolicy},
        quantities::OffableDuration,
    },
    skypilot::{AttemptRunSpec, HOSTS_FILE, JobIdentity, ServerContext, task_id},
    time::Timestamp,
};

use super::{accept, refuse};

fn identity() -> JobIdentity {
    JobIdentity {
        job_id: "17".to_owned(),
        submitted_at: Timestamp::parse("2026-11-15T16:00:01.000042Z").unwrap(),
        user: "ann".to_owned(),
        rank: 0,
        copies: 1,
    }
}

fn spec(
    text: &str,
    task: u32,
    candidate: u32,
    site: &ServerContext,
) -> (AttemptRunSpec, windlass_model::config::task::Task) {
    let spec =
        AttemptRunSpec::for_attempt(&accept(text).plan, task, candidate, None, &identity(), site).unwrap();
    let Configuration::Task(task) = &spec.configuration else { panic!("not a task") };
    let task = (**task).clone();
    (spec, task)
}

fn program(text: &str, site: &ServerContext) -> String {
    spec(text, 0, 0, site).1.commands.concat()
}

#[test]
fn a_task_id_is_built_from_immutable_properties() {
    let plan = accept("name: p\n---\nname: a\nrun: a\n---\nrun: b\n").plan;
    assert_eq!(task_id(&plan, 0, &identity()), "sky-managed-2026-11-15-16-00-01-000042_p_a_17-0");
    assert_eq!(task_id(&plan, 1, &identity()), "sky-managed-2026-11-15-16-00-01-000042_p_p-1_17-1");
    let one = accept("name: solo\nrun: a\n").plan;
    assert_eq!(task_id(&one, 0, &identity()), "sky-managed-2026-11-15-16-00-01-000042_solo_17-0");
}

#[test]
fn setup_and_run_use_separate_shells_with_the_gate_between_them() {
    let text = "setup: |\n  echo it's ready\nrun: python train.py\nnum_nodes: 2\n";
    let program = program(text, &ServerContext::default());
    let setup = program.find("echo it'\"'\"'s ready").unwrap();
    let gate = program.find("WINDLASS_GATE_FILE").unwrap();
    let run = program.find("python train.py").unwrap();
    assert!(setup < gate && gate < run, "{program}");
    assert_eq!(program.matches("/bin/bash -i -c ").count(), 2);
    assert!(!program.contains("set -e"));
    assert_eq!(program.matches("(exec 2>&3 3>&-").count(), 2, "the shell's own words go nowhere");
    assert!(program.contains("SKYPILOT_SETUP_NODE_RANK") && program.contains("SKYPILOT_NODE_IPS"));
    let alone =
        self::program("run: a\n", &ServerContext { has_private_home: true, ..ServerContext::default() });
    assert!(!alone.contains("WINDLASS_GATE_FILE") && alone.contains("export HOME="), "{alone}");
}

#[test]
fn a_run_configuration_carries_the_resources_and_files_of_its_task() {
    let text = "name: x\nresources:\n  cpus: 4\n  memory: 16+\n  use_spot: true\n  ports: [8080, 9000-9001]\n  image_id: docker:python:3.12\n  infra: aws/us-east-1\n  ordered:\n    - accelerators: A100-80GB:8\n    - accelerators: [T4]\n      use_spot: false\nenvs: {A: b}\nsecrets: {S: t}\nworkdir: ./code\nvolumes: {/ckpt: disk}\nrun: a\n";
    let site = ServerContext { backends: vec!["aws".to_owned()], ..ServerContext::default() };
    let (first, task) = spec(text, 0, 0, &site);
    assert_eq!(first.secrets, ["S"]);
    assert_eq!(task.run.image.as_deref(), Some("python:3.12"));
    assert_eq!(task.profile.provisioning.spot_policy, Some(SpotPolicy::Spot));
    let placed = &task.profile.provisioning;
    assert_eq!(
        (placed.backends.as_ref().unwrap()[0].as_str(), placed.regions.as_ref().unwrap()[0].as_str()),
        ("aws", "us-east-1")
    );
    assert_eq!((task.run.resources.cpu.count.min, task.run.resources.memory.min), (Some(4), Some(16.0)));
    let gpu = task.run.resources.gpu.clone().unwrap();
    assert_eq!(
        (gpu.name.unwrap(), gpu.count.min, gpu.memory.unwrap().min),
        (vec!["A100".to_owned()], Some(8), Some(80.0))
    );
    assert_eq!(task.ports.iter().map(|port| port.container_port).collect::<Vec<_>>(), [8080, 9000, 9001]);
    let env = task.run.env.values();
    assert_eq!(
        (env["A"].as_str(), env["SKYPILOT_MANAGED_JOB_ID"].as_str(), env["SKYPILOT_USER"].as_str()),
        ("b", "17", "ann")
    );
    assert!(!env.contains_key("S"), "a secret is not part of the configuration");
    assert_eq!(task.run.files[0].path, "sky_workdir");
    assert_eq!(task.run.volumes[0].path(), "/ckpt");
    let named =
        ServerContext { has_no_spot: true, fleets: vec!["aws".to_owned()], ..ServerContext::default() };
    let (_, task) = spec(text, 0, 1, &named);
    assert_eq!(task.profile.provisioning.spot_policy, Some(SpotPolicy::OnDemand));
    assert_eq!(task.profile.fleets.as_ref().unwrap()[0].name, "aws");
}

#[test]
fn a_cloud_region_and_price_restrict_the_nodes_of_a_task() {
    let site =
        ServerContext { backends: vec!["aws".to_owned(), "gcp".to_owned()], ..ServerContext::default() };
    let limits = |resources: &str, candidate: u32| {
        let (_, task) = spec(&format!("resources: {resources}\nrun: a\n"), 0, candidate, &site);
        let limits = task.profile.provisioning;
        let price = limits.max_price.map(|price| price.0);
        let words = |list: Vec<BackendType>| list.iter().map(|word| word.as_str().to_owned()).collect();
        (limits.backends.map(words), limits.regions, limits.availability_zones, price)
    };
    let one = |word: &str| Some(vec![word.to_owned()]);
    assert_eq!(limits("{cloud: aws}", 0), (one("aws"), None, None, None));
    let whole = "{cloud: AWS, region: eu-west-1, zone: eu-west-1a, max_hourly_cost: 1.5}";
    assert_eq!(limits(whole, 0), (one("aws"), one("eu-west-1"), one("eu-west-1a"), Some(1.5)));
    assert_eq!(limits("{region: eu-west-1}", 0), (None, one("eu-west-1"), None, None));
    let each = "{cloud: aws, any_of: [{region: us-east-1}, {cloud: gcp, max_hourly_cost: 2}]}";
    assert_eq!(limits(each, 0), (one("aws"), one("us-east-1"), None, None));
    assert_eq!(limits(each, 1), (one("gcp"), None, None, Some(2.0)));
    assert_eq!(
        refuse("resources: {infra: aws, region: eu-west-1}\nrun: a\n"),
        ["1: `infra` and `region` are mutually exclusive: write `infra: CLOUD/REGION/ZONE`"]
    );
    assert_eq!(refuse("resources: {max_hourly_cost: 0}\nrun: a\n").len(), 1);
}

#[test]
fn a_disk_size_and_an_instance_type_restrict_the_nodes_of_a_task() {
    let limits = |resources: &str, candidate: u32| {
        let (_, task) =
            spec(&format!("resources: {resources}\nrun: a\n"), 0, candidate, &ServerContext::default());
        let disk = task.run.resources.disk.map(|disk| (disk.size.min, disk.size.max));
        (disk, task.profile.provisioning.instance_types)
    };
    assert_eq!(limits("{cpus: 1}", 0), (None, None), "neither is required if it is not named");
    assert_eq!(limits("{disk_size: 256}", 0).0, Some((Some(256.0), None)));
    assert_eq!(limits("{disk_size: 1TB}", 0).0, Some((Some(1024.0), None)));
    let each =
        "{disk_size: 100GB, any_of: [{instance_type: m5.large}, {instance_type: m5.xlarge, disk_size: 50}]}";
    assert_eq!(limits(each, 0), (Some((Some(100.0), None)), Some(vec!["m5.large".to_owned()])));
    assert_eq!(limits(each, 1), (Some((Some(50.0), None)), Some(vec!["m5.xlarge".to_owned()])));
    assert_eq!(
        refuse("resources: {disk_size: 100+}\nrun: a\n"),
        ["1: invalid `disk_size`: `100+` is not a size in GB such as 100 or 100GB"]
    );
}

#[test]
fn labels_and_max_duration_are_passed_to_the_run() {
    let text = "resources: {labels: {team: a}}\nmax_duration: 2h\nrun: a\n";
    let (_, task) = spec(text, 0, 0, &ServerContext::default());
    assert_eq!(task.profile.provisioning.tags.unwrap().0["team"], "a");
    assert_eq!(task.profile.max_duration, OffableDuration::Seconds(7200));
}

#[test]
fn job_specs_can_be_built_from_a_task_run() {
    let text = "num_nodes: 2\nsetup: true\nrun: a\n";
    let text = text.replace("setup: true", "setup: make");
    let (spec, _) = spec(&text, 0, 0, &ServerContext::default());
    let inputs = JobSpecInputs {
        run_name: "job-1",
        configuration: &spec.configuration,
        profile: None,
        inherited: &InheritedSpec::default(),
        server_url: None,
    };
    let jobs = job_spec_builder::job_specs(&inputs).unwrap();
    assert_eq!((jobs.len(), jobs[1].job_num, jobs[0].commands[0].as_str()), (2, 1, "/bin/bash"));
    assert_eq!(jobs[0].retry, None);
}

#[test]
fn group_name_and_task_id_variables_are_set_for_every_kind_of_task() {
    let group = "name: g\nexecution: parallel\n---\nname: a\nrun: a\n";
    assert_eq!(
        spec(group, 0, 0, &ServerContext::default()).1.run.env.values()["SKYPILOT_JOBGROUP_NAME"],
        "g"
    );
    let request = |header: &str| {
        let text = format!("name: g\nexecution: parallel\n{header}---\nname: a\nrun: a\n");
        spec(&text, 0, 0, &ServerContext::default()).1.run.env.values().get(HOSTS_FILE).cloned()
    };
    assert_eq!(request("").as_deref(), Some(""));
    assert_eq!(request("inter_connection: true\n").as_deref(), Some("required"));
    assert_eq!(request("inter_connection: false\n"), None);
    let foreign = "type: task\nname: prepare\ncommands: [make]\n";
    let (_, task) = spec(foreign, 0, 0, &ServerContext::default());
    assert_eq!(task.commands, ["make"]);
    assert!(task.run.env.values()["SKYPILOT_TASK_ID"].ends_with("_prepare_17-0"));
}
