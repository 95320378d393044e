//! Command line options that override a file.

use windlass_model::{
    managed_job::plan::{Deadline, ManagedJobPlan, RecoveryStrategy},
    skypilot::Overrides,
};

use super::accept;

fn with(text: &str, overrides: &Overrides) -> Result<ManagedJobPlan, Vec<String>> {
    let mut plan = accept(text).plan;
    let message = overrides.apply(&mut plan);
    message.map(|()| plan).map_err(|problems| problems.iter().map(|one| one.message.clone()).collect())
}

fn word(text: &str) -> Option<String> {
    Some(text.to_owned())
}

#[test]
fn overrides_apply_to_every_task_and_keep_other_fields() {
    let text = "name: a\nresources: {cpus: 2, memory: 4, infra: aws, use_spot: true}\nrun: a\n---\n\
                name: b\nnum_nodes: 4\nresources: {any_of: [{infra: gcp}, {infra: aws}]}\nrun: b\n";
    let overrides = Overrides {
        gpus: word("A100:8"),
        cpus: word("16+"),
        use_spot: Some(false),
        job_recovery: word("{strategy: FAILOVER, max_restarts_on_errors: 3}"),
        ..Overrides::default()
    };
    let plan = with(text, &overrides).unwrap();
    let nodes: Vec<u32> = plan.tasks.iter().map(|task| task.nodes).collect();
    assert_eq!(nodes, [1, 4]);
    for task in &plan.tasks {
        assert_eq!(
            (task.recovery.strategy, task.recovery.max_restarts_on_errors),
            (RecoveryStrategy::Failover, 3)
        );
        for one in &task.candidates {
            let gpu = one.accelerator.as_ref().unwrap();
            assert_eq!((gpu.name.as_str(), gpu.count, one.spot), ("A100", 8.0, Some(false)));
            let cpus = one.cpus.unwrap();
            assert_eq!((cpus.of, cpus.or_more), (16.0, true));
        }
    }
    let infra = |task: usize| -> Vec<Option<&str>> {
        plan.tasks[task].candidates.iter().map(|one| one.infra.as_deref()).collect()
    };
    assert_eq!((infra(0), infra(1)), (vec![Some("aws")], vec![Some("gcp"), Some("aws")]));
    assert_eq!(plan.tasks[0].candidates[0].memory.unwrap().of, 4.0);
    // One `infra` for all merges alternatives that differ in nothing else.
    let plan = with(text, &Overrides { infra: word("k8s"), num_nodes: Some(2), ..Overrides::default() });
    let plan = plan.unwrap();
    assert_eq!((plan.tasks[1].candidates.len(), plan.tasks[0].nodes, plan.tasks[1].nodes), (1, 2, 2));
    assert_eq!(with(text, &Overrides::default()).unwrap(), accept(text).plan);
}

#[test]
fn a_deadline_override_keeps_the_work_of_the_file_unless_it_gives_its_own() {
    let deadline = |text: &str, message: &str| {
        let overrides = Overrides { deadline: word(message), ..Overrides::default() };
        with(text, &overrides).map(|plan| plan.tasks[0].deadline.unwrap())
    };
    let hour = 3600;
    let own = "run: a\ndeadline: {within: 60h, work: 48h, changeover: 6m}\n";
    let found = deadline(own, "50h").unwrap();
    assert_eq!(found, Deadline { within: 50 * hour, work: 48 * hour, changeover: 360 });
    let found = deadline("run: a\nmax_duration: 2h\n", "5h").unwrap();
    assert_eq!((found.within, found.work), (5 * hour, 2 * hour));
    let found = deadline("run: a\n", "{within: 5h, work: 3h}").unwrap();
    assert_eq!((found.within, found.work), (5 * hour, 3 * hour));
    assert!(deadline("run: a\n", "5h").unwrap_err()[0].contains("`work`"));
}

#[test]
fn an_invalid_override_is_reported_and_changes_nothing() {
    let refused = |overrides: Overrides| {
        let mut plan = accept("run: a\n").plan;
        let before = plan.clone();
        let problems = overrides.apply(&mut plan).unwrap_err();
        assert_eq!(plan, before);
        problems.iter().map(|one| one.message.clone()).collect::<Vec<_>>().join("; ")
    };
    assert!(refused(Overrides { cpus: word("many"), ..Overrides::default() }).contains("cpus"));
    assert!(
        refused(Overrides { job_recovery: word("SOMETIMES"), ..Overrides::default() }).contains("SOMETIMES")
    );
    assert!(refused(Overrides { deadline: word("soon"), ..Overrides::default() }).contains("soon"));
    // Nothing can be injected next to it.
    refused(Overrides { job_recovery: word("NONE\nservice: {replicas: 1}"), ..Overrides::default() });
    let ours = "type: task\nname: task-one\ncommands: [\"true\"]\n";
    let no = with(ours, &Overrides { cpus: word("4"), ..Overrides::default() }).unwrap_err();
    assert!(no[0].contains("windlass apply"), "{no:?}");
}
