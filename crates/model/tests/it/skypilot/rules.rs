//! The fields of a task file, one rule at a time.

use windlass_model::{
    managed_job::plan::{RecoveryStrategy, Shape, TaskBody, Workdir},
    skypilot::{self, CommandLineValues, TaskFileKind},
};

use super::{accept, accept_with, given, refuse, secret};

#[test]
fn an_unknown_task_file_key_is_reported_with_its_line_and_a_suggestion() {
    let problems = skypilot::parse_task_file("name: x\nnum_node: 2\nrun: a\n", &CommandLineValues::default())
        .unwrap_err();
    assert_eq!(problems[0].span.start.line, 2);
    assert_eq!(problems[0].message, "unknown field `num_node`");
    assert_eq!(problems[0].hint.as_deref(), Some("did you mean `num_nodes`?"));
    assert_eq!(refuse("run: a\nresources:\n  acelerators: H100\n"), ["3: unknown field `acelerators`"]);
}

#[test]
fn accelerators_are_a_string_a_map_a_set_or_a_list() {
    let names = |text: &str| -> Vec<String> {
        let parsed = accept(&format!("run: a\nresources:\n  accelerators: {text}\n"));
        let all = parsed.plan.tasks[0].candidates.iter();
        all.filter_map(|one| one.accelerator.as_ref().map(|a| format!("{}x{}", a.count, a.name))).collect()
    };
    assert_eq!(names("H100"), ["1xH100"]);
    assert_eq!(names("H100:8"), ["8xH100"]);
    assert_eq!(names("{H100: 8}"), ["8xH100"]);
    assert_eq!(names("{A100:1, V100:2}"), ["1xA100", "2xV100"]);
    assert_eq!(names("[L4:8, A10G:8]"), ["8xL4", "8xA10G"]);
    assert_eq!(names("null"), Vec::<String>::new());
    assert_eq!(refuse("resources: {accelerators: 'H100:'}\nrun: a\n").len(), 1);
    assert_eq!(refuse("resources: {accelerators: H100, gpus: H100}\nrun: a\n").len(), 1);
}

#[test]
fn resource_alternatives_inherit_the_surrounding_fields() {
    let parsed = accept(
        "run: a\nresources:\n  cpus: 4+\n  memory: 2x\n  accelerators: A100:8\n  ordered:\n    - infra: aws/us-east-1\n      cpus: 2\n    - {infra: gcp, accelerators: {T4: 4, L4: 1}}\n",
    );
    let seen: Vec<String> = parsed.plan.tasks[0]
        .candidates
        .iter()
        .map(|one| {
            let (cpus, gpu) = (one.cpus.unwrap(), one.accelerator.clone().unwrap());
            let (infra, memory) = (one.infra.clone().unwrap(), one.memory.unwrap());
            format!(
                "{infra} {}{} {}GB {}:{}",
                cpus.of,
                if cpus.or_more { "+" } else { "" },
                memory.of,
                gpu.name,
                gpu.count
            )
        })
        .collect();
    assert_eq!(seen, ["aws/us-east-1 2 4GB A100:8", "gcp 4+ 8GB T4:4", "gcp 4+ 8GB L4:1"]);
    let both = refuse("run: a\nresources:\n  any_of: [{cpus: 1}]\n  ordered: [{cpus: 2}]\n");
    assert_eq!(both, ["4: `any_of` and `ordered` are mutually exclusive"]);
}

#[test]
fn alternatives_are_ordered_by_price_unless_the_file_orders_them() {
    let by_price =
        |resources: &str| accept(&format!("run: a\nresources: {resources}\n")).plan.tasks[0].cheapest_first;
    assert!(by_price("{any_of: [{cpus: 1}, {cpus: 2}]}"));
    assert!(by_price("{accelerators: {A100: 1, V100: 2}}") && by_price("{accelerators: {A100:1, V100:2}}"));
    assert!(!by_price("{ordered: [{cpus: 1}, {cpus: 2}]}"));
    assert!(!by_price("{accelerators: [A100, V100]}") && !by_price("{accelerators: {A100: 1}}"));
}

#[test]
fn a_relative_file_mount_is_resolved_in_the_working_directory() {
    let path = |mount: &str| {
        let parsed = accept(&format!("run: a\nworkdir: code\nfile_mounts:\n  {mount}: data.txt\n"));
        let TaskBody::Script(script) = &parsed.plan.tasks[0].body else { panic!("not a script") };
        let local: Vec<String> =
            parsed.plan.tasks[0].body.local_files().into_iter().map(|file| file.1).collect();
        assert_eq!(local, ["sky_workdir", script.files[0].path.as_str()], "the directory comes first");
        script.files[0].path.clone()
    };
    for (mount, want) in [
        ("data/x.txt", "sky_workdir/data/x.txt"),
        ("././x.txt", "sky_workdir/x.txt"),
        ("/abs/x.txt", "/abs/x.txt"),
        ("~/x.txt", "~/x.txt"),
        ("dir/", "sky_workdir/dir"),
    ] {
        assert_eq!(path(mount), want, "{mount}");
    }
}

#[test]
fn a_label_that_cannot_be_a_tag_is_warned_about() {
    let parsed = accept("run: a\nresources: {labels: {team/x: y, kept: yes-it-is}}\n");
    let warned: Vec<&str> = parsed.warnings.iter().map(|warning| warning.message.as_str()).collect();
    assert_eq!(warned, ["label `team/x: y` is ignored: a tag allows only letters, digits, `_` and `-`"]);
}

#[test]
fn job_recovery_is_a_name_or_a_map_and_equal_in_every_alternative() {
    let of = |text: &str| {
        accept(&format!("run: a\nresources:\n  job_recovery: {text}\n")).plan.tasks[0].recovery.clone()
    };
    assert_eq!(of("null").strategy, RecoveryStrategy::EagerNextRegion);
    assert_eq!(of("failover").strategy, RecoveryStrategy::Failover);
    assert_eq!(of("NONE").strategy, RecoveryStrategy::None);
    let map = of(
        "{strategy: FAILOVER, max_restarts_on_errors: 3, recover_on_exit_codes: [33, 34], max_launch_tries: 5, max_launch_wait: 2h}",
    );
    assert_eq!((map.strategy, map.max_restarts_on_errors), (RecoveryStrategy::Failover, 3));
    assert_eq!(
        (map.recover_on_exit_codes, map.max_launch_tries, map.max_launch_wait),
        (vec![33, 34], Some(5), Some(7200))
    );
    let warned = accept("run: a\nresources:\n  job_recovery:\n    recover_on_exit_codes: [1, 137]\n");
    assert_eq!(warned.plan.tasks[0].recovery.recover_on_exit_codes, [1]);
    assert!(warned.warnings[0].message.contains("137"), "{:?}", warned.warnings);
    assert_eq!(refuse("run: a\nresources: {job_recovery: {recover_on_exit_codes: [1, 1]}}\n").len(), 1);
    assert_eq!(refuse("run: a\nresources: {job_recovery: {recover_on_exit_codes: 256}}\n").len(), 1);
    let differs = refuse("run: a\nresources:\n  any_of:\n    - job_recovery: FAILOVER\n    - cpus: 2\n");
    assert_eq!(differs, ["4: `job_recovery` must be the same in every entry of `any_of`"]);
}

#[test]
fn job_priority_is_bounded_and_is_the_highest_of_its_tasks() {
    let job = accept("resources: {priority: 5}\nrun: a\n---\nresources: {priority: -7}\nrun: b\n");
    assert_eq!(job.plan.priority, 5);
    assert_eq!(accept("run: a\n").plan.priority, 0);
    assert_eq!(
        refuse("resources: {priority: 1001}\nrun: a\n"),
        ["1: `priority` must be between -1000 and 1000, not 1001"]
    );
}

#[test]
fn variables_are_substituted_in_paths_but_not_in_scripts() {
    let text = "envs:\n  DIR: data\n  N: 3\n  ON: true\nworkdir: ./$DIR\nfile_mounts:\n  /in/${DIR}: ./$DIR/x\nrun: echo $DIR\nsetup: echo ${DIR}\n";
    let parsed = accept_with(text, &given(&[("DIR", "other"), ("EXTRA", "1")]));
    let TaskBody::Script(script) = &parsed.plan.tasks[0].body else { panic!("not a script") };
    assert_eq!(script.workdir, Some(Workdir::Local("./other".to_owned())));
    assert_eq!(
        (script.files[0].path.as_str(), script.files[0].local_path.as_str()),
        ("/in/other", "./other/x")
    );
    assert_eq!((script.run.as_deref(), script.setup.as_deref()), (Some("echo $DIR"), Some("echo ${DIR}")));
    let values: Vec<_> = script.envs.iter().map(|(k, v)| format!("{k}={v}")).collect();
    assert_eq!(values, ["DIR=other", "EXTRA=1", "N=3", "ON=True"]);
    assert_eq!(refuse("envs: {1X: a}\nrun: a\n").len(), 1);
}

#[test]
fn a_secret_without_a_value_parses_and_cannot_be_launched() {
    let text = "secrets:\n  TOKEN:\nrun: a\n";
    let refusals = accept(text).into_launchable().unwrap_err();
    assert_eq!(refusals[0].message, "secret `TOKEN` has no value");
    let with = CommandLineValues {
        secrets: [("TOKEN".to_owned(), secret("s3cr3t"))].into(),
        ..CommandLineValues::default()
    };
    let parsed = accept_with(text, &with);
    assert!(!format!("{parsed:?}").contains("s3cr3t"), "a secret is never shown");
    assert!(!serde_json::to_string(&parsed.plan).unwrap().contains("s3cr3t"), "a plan holds names only");
    let skypilot::LaunchableJob { plan, secrets, .. } = parsed.into_launchable().unwrap();
    let TaskBody::Script(script) = &plan.tasks[0].body else { panic!("not a script") };
    assert_eq!(script.secrets, ["TOKEN"]);
    assert_eq!(secrets[0]["TOKEN"], secret("s3cr3t"));
}

#[test]
fn unsupported_task_fields_are_refused_at_launch_with_a_hint() {
    let cases = [
        ("service: {readiness_probe: /}\nrun: a\n", "service", "windlass apply"),
        ("pool: {workers: 2}\nrun: a\n", "pool", "windlass apply"),
        ("run: a\nresources: {image_id: ami-1234}\n", "image_id", "docker:"),
        ("run: a\nresources: {accelerators: tpu-v5p-8}\n", "TPU", ""),
        ("run: a\nresources: {accelerators: V100, accelerator_args: {x: 1}}\n", "accelerator_args", ""),
        ("run: a\nfile_mounts: {/x: s3://bucket}\n", "file_mounts", "volume"),
        ("run: a\nfile_mounts: {/x: {name: b, store: gcs}}\n", "file_mounts", "volume"),
        ("run: a\nvolumes: {/x: {size: 1Gi}}\n", "volumes", "windlass apply"),
        (
            "run: a\nresources: {volumes: [{name: data, path: /x}]}\n",
            "`volumes` in `resources`",
            "of the task",
        ),
        ("run: a\nresources: {any_of: [{volumes: []}]}\n", "`volumes` in `resources`", "of the task"),
    ];
    for (text, names, way_out) in cases {
        let refusals = accept(text).into_launchable().unwrap_err();
        assert!(refusals[0].message.contains(names), "{text}: {refusals:?}");
        assert!(refusals[0].hint.clone().unwrap_or_default().contains(way_out), "{text}: {refusals:?}");
        assert!(refusals[0].span.is_known());
    }
}

#[test]
fn each_task_field_without_effect_gives_one_warning() {
    let text = "run: a\napi_server_access: true\nconfig: {aws: {x: 1}, gcp: {}}\nresources:\n  local_disk: nvme\n  any_of:\n    - disk_tier: best\n    - disk_tier: low\n";
    let warnings: Vec<_> =
        accept(text).warnings.into_iter().map(|w| format!("{} {}", w.span.start.line, w.path)).collect();
    let expected = [
        "2 api_server_access",
        "3 config.aws",
        "3 config.gcp",
        "5 resources.local_disk",
        "7 resources.any_of[0].disk_tier",
        "8 resources.any_of[1].disk_tier",
    ];
    assert_eq!(warnings, expected);
}

#[test]
fn the_size_of_shared_memory_is_taken_from_the_options_of_docker() {
    let shm = |options: &str| {
        let parsed = accept(&format!("run: a\nconfig: {{docker: {{run_options: {options}}}}}\n"));
        let TaskBody::Script(script) = &parsed.plan.tasks[0].body else { panic!("not a script") };
        let warnings: Vec<String> = parsed.warnings.iter().map(|one| one.message.clone()).collect();
        (script.shm_size, warnings)
    };
    assert_eq!(shm("['--shm-size=2g']"), (Some(2.0), vec![]));
    assert_eq!(shm("--shm-size 512mb"), (Some(0.5), vec![]));
    let (size, warnings) = shm("['--shm-size=many', --gpus=all]");
    assert_eq!((size, warnings.len()), (None, 2));
    assert_eq!(
        warnings[1],
        "`--gpus=all` in `config.docker.run_options` has no effect: only `--shm-size=SIZE` is supported"
    );
    let old = accept(
        "run: a\nexperimental: {config_overrides: {docker: {run_options: '--shm-size=1g'}, aws: {}}, x: 1}\n",
    );
    let warned: Vec<&str> = old.warnings.iter().map(|one| one.path.as_str()).collect();
    assert_eq!(warned, ["experimental.config_overrides.aws", "experimental.x"]);
    let identity = windlass_model::skypilot::JobIdentity {
        job_id: "1".to_owned(),
        submitted_at: windlass_model::time::Timestamp(0),
        user: "ada".to_owned(),
        rank: 0,
        copies: 1,
    };
    let site = skypilot::ServerContext::default();
    let run = skypilot::AttemptRunSpec::for_attempt(&old.plan, 0, 0, None, &identity, &site).unwrap();
    assert_eq!(run.configuration.run().unwrap().resources.shm_size, Some(1.0));
}

#[test]
fn an_image_by_region_is_one_image_or_refused() {
    let image = |text: &str| {
        let parsed = accept(&format!("run: a\nresources: {{image_id: {text}}}\n"));
        (parsed.plan.tasks[0].candidates[0].image.clone(), parsed.refusals.len())
    };
    assert_eq!(
        image("{us-east-1: 'docker:debian', us-west-2: 'docker:debian'}"),
        (Some("debian".to_owned()), 0)
    );
    assert_eq!(image("{us-east-1: 'docker:debian', us-west-2: 'docker:alpine'}"), (None, 1));
    assert_eq!(image("{us-east-1: ami-1}"), (None, 1));
    assert_eq!(image("'docker:debian'"), (Some("debian".to_owned()), 0));
}

#[test]
fn a_job_group_parses_its_primary_tasks_and_termination_delays() {
    let text = "name: g\nexecution: parallel\nprimary_tasks: [b]\ntermination_delay: {default: 10s, c: 1m}\nlater: 1\n---\nname: a\nrun: a\n---\nname: b\nrun: b\n---\nname: c\nrun: c\n";
    let parsed = accept(text);
    let Shape::Group(group) = &parsed.plan.shape else { panic!("not a group") };
    assert_eq!((group.primary.clone(), group.termination_delay.clone()), (vec![1], vec![10, 10, 60]));
    assert_eq!(parsed.warnings[0].path, "later");
    assert!(parsed.plan.tasks.iter().all(|task| task.after.is_empty()));
    let all = accept("name: g\nexecution: parallel\nprimary_tasks: []\n---\nname: a\nrun: a\n");
    let Shape::Group(group) = &all.plan.shape else { panic!("not a group") };
    assert_eq!(group.primary, [0]);
    assert_eq!(refuse("name: g\nexecution: parallel\n"), ["1: a job group requires at least one task"]);
    assert_eq!(refuse("name: g g\nexecution: parallel\n---\nname: a\nrun: a\n").len(), 1);
}

#[test]
fn m7_each_task_of_a_pipeline_depends_on_the_previous_one() {
    let parsed = accept("name: p\n---\nrun: a\n---\nname: mid\nrun: b\n---\nrun: c\n");
    let after: Vec<_> = parsed.plan.tasks.iter().map(|task| task.after.clone()).collect();
    assert_eq!((parsed.kind, after), (TaskFileKind::Pipeline, vec![vec![], vec![0], vec![1]]));
    let names: Vec<_> = (0..3).map(|task| parsed.plan.task_name(task)).collect();
    assert_eq!(names, ["p-0", "mid", "p-2"]);
}

#[test]
fn m7_depends_on_forms_a_graph_and_a_cycle_is_refused_by_name() {
    let diamond = "name: a\nrun: a\n---\nname: b\ndepends_on: [a]\nrun: b\n---\nname: c\ndepends_on: a\nrun: c\n---\nname: d\ndepends_on: [b, c]\nrun: d\n";
    let after: Vec<_> = accept(diamond).plan.tasks.iter().map(|task| task.after.clone()).collect();
    assert_eq!(after, [vec![], vec![0], vec![0], vec![1, 2]]);
    let circle = "name: a\ndepends_on: c\nrun: a\n---\nname: b\ndepends_on: a\nrun: b\n---\nname: c\ndepends_on: b\nrun: c\n";
    assert_eq!(refuse(circle), ["2: `depends_on` contains a cycle: a after c after b after a"]);
    assert_eq!(
        refuse("name: a\ndepends_on: aa\nrun: a\n"),
        ["2: `depends_on` names `aa`, but no task has this name"]
    );
    assert_eq!(refuse("name: a\ndepends_on: a\nrun: a\n"), ["2: `depends_on` contains a cycle: a after a"]);
}

#[test]
fn a_task_configuration_can_be_part_of_a_managed_job() {
    let text = "type: task\nname: prepare\ncommands: [make]\nnodes: 2\nenv: [TOKEN]\n---\nname: train\ndepends_on: prepare\nrun: train\n";
    assert_eq!(refuse(text), ["5: variable `TOKEN` has no value"]);
    let parsed = accept_with(text, &given(&[("TOKEN", "x")]));
    assert_eq!((parsed.kind, parsed.plan.tasks[0].nodes), (TaskFileKind::Dag, 2));
    assert!(matches!(parsed.plan.tasks[0].body, TaskBody::Configuration(_)));
    let service = refuse("type: service\nname: s\ncommands: [serve]\nport: 80\n");
    assert_eq!(service, ["1: `type: service` cannot be part of a managed job"]);
}

#[test]
fn a_deadline_requires_work_or_max_duration() {
    let deadline = accept("run: a\ndeadline: {within: 48h, work: 30h, changeover: 10m}\n").plan.tasks[0]
        .deadline
        .unwrap();
    assert_eq!((deadline.within, deadline.work, deadline.changeover), (172_800, 108_000, 600));
    let short = accept("run: a\nmax_duration: 1h\ndeadline: 2h\n").plan.tasks[0].deadline.unwrap();
    assert_eq!((short.within, short.work), (7_200, 3_600));
    assert!(refuse("run: a\ndeadline: 2h\n")[0].contains("`work`"));
    let hopeless = accept("run: a\ndeadline: {within: 1h, work: 2h}\n");
    assert_eq!(hopeless.warnings.len(), 1);
}

#[test]
fn malformed_task_files_never_panic_the_parser() {
    for text in [
        "",
        "---",
        "[]",
        "a",
        "run: [1]",
        "resources: []",
        "resources: {any_of: 3}",
        "envs: [A]",
        "service: 1",
        "depends_on: {}",
        "deadline: []",
        "file_mounts: {/x: null}",
        "name: {}\n---\nrun: a",
        "execution: [parallel]",
    ] {
        let _ = skypilot::parse_task_file(text, &CommandLineValues::default());
    }
    assert_eq!(refuse(""), ["0: the file is empty; a task requires `run`"]);
}

#[test]
fn secret_values_are_per_task_and_given_values_reach_task_configurations() {
    let text =
        "name: p\n---\nname: a\nsecrets: {K: valueA}\nrun: x\n---\nname: b\nsecrets: {K: valueB}\nrun: x\n";
    let two =
        skypilot::parse_task_file(text, &CommandLineValues::default()).unwrap().into_launchable().unwrap();
    let values: Vec<_> = two.secrets.iter().map(|of_task| of_task["K"].clone()).collect();
    assert_eq!(values, [secret("valueA"), secret("valueB")]);
    let given = CommandLineValues {
        envs: [("ADDED".to_owned(), "1".to_owned()), ("A".to_owned(), "2".to_owned())].into(),
        secrets: [("K".to_owned(), secret("given"))].into(),
    };
    let own =
        skypilot::parse_task_file("type: task\nname: own\nenv: {A: b}\ncommands: [x]\n", &given).unwrap();
    let own = own.into_launchable().unwrap();
    assert_eq!(own.secrets[0]["K"], secret("given"));
    let TaskBody::Configuration(task) = &own.plan.tasks[0].body else { panic!("no configuration") };
    let values: Vec<_> = task.run.env.values().into_iter().collect();
    assert_eq!(values, [("A".to_owned(), "2".to_owned()), ("ADDED".to_owned(), "1".to_owned())]);
}

#[test]
fn a_task_file_is_distinguished_from_a_configuration_by_its_fields() {
    for text in [
        "run: a\n",
        "name: x\n",
        "resources: {cpus: 2}\n",
        "name: p\n---\nrun: a\n",
        "type: task\ndeadline: 2h\n",
    ] {
        assert!(skypilot::is_task_file(text), "{text}");
    }
    for text in
        ["", "type: task\ncommands: [a]\n", "commands: [a]\n", "type: fleet\nname: x\n", "type: task\n  bad"]
    {
        assert!(!skypilot::is_task_file(text), "{text}");
    }
}
