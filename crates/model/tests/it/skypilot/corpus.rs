//! Task files from other projects: each must get the verdict it got there.
//!
//! The files are outside of the repository. Without them the test prints a message, and the small files below still
//! test the parser.

use std::path::{Path, PathBuf};

use serde_json::Value;
use windlass_model::skypilot::{
    self, CommandLineValues, ParsedTaskFile, ServerContext, ServiceError, ServiceSettings,
};

use super::given;

#[expect(clippy::disallowed_methods, reason = "the corpus is a folder of files")]
fn read(path: &Path) -> Option<String> {
    std::fs::read_to_string(path).ok()
}

fn corpus() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../../../shared/corpus/skypilot")
}

fn words(value: &Value) -> Vec<&str> {
    value.as_array().map(|list| list.iter().filter_map(Value::as_str).collect()).unwrap_or_default()
}

/// Returns what is wrong with our result for one file; `None` if it is right.
fn verdict(entry: &Value, text: &str) -> Option<String> {
    let required = words(&entry["env_required"]);
    let values: Vec<(&str, &str)> = required.iter().map(|name| (*name, "some-value")).collect();
    let answer = skypilot::parse_task_file(text, &given(&values));
    if entry["verdict"] == "reject" {
        let Err(problems) = answer else { return Some("accepted, should be refused".to_owned()) };
        let fields = words(&entry["fields"]);
        let named = problems.iter().any(|problem| {
            problem.span.is_known()
                && fields.iter().any(|field| problem.message.contains(&format!("`{field}`")))
        });
        return (!named).then(|| format!("refused for another reason: {problems:?}"));
    }
    let parsed = match answer {
        Ok(parsed) => parsed,
        Err(problems) => return Some(format!("refused: {problems:?}")),
    };
    let nodes = parsed.plan.tasks.iter().map(|task| task.nodes).max();
    let found = (Some(parsed.kind.as_str()), parsed.plan.tasks.len() as u64, nodes.map(u64::from));
    let expected = (entry["kind"].as_str(), entry["tasks"].as_u64().unwrap(), entry["max_nodes"].as_u64());
    if found != expected {
        return Some(format!("is {found:?}, should be {expected:?}"));
    }
    let runs_here = entry["runnable_locally"] == true;
    if runs_here && !parsed.refusals.is_empty() {
        return Some(format!("should run here: {:?}", parsed.refusals));
    }
    if matches!(expected.0, Some("service" | "pool")) && parsed.clone().into_launchable().is_ok() {
        return Some("is not a job, and is not refused at launch".to_owned());
    }
    if expected.0 == Some("service")
        && let Err(why) = service_configurations(&parsed)
    {
        return Some(why);
    }
    if parsed.warnings.iter().chain(&parsed.refusals).any(|reported| !reported.span.is_known()) {
        return Some("a warning without a line".to_owned());
    }
    let stored = serde_json::to_string(&parsed.plan).unwrap();
    if serde_json::from_str::<windlass_model::managed_job::plan::ManagedJobPlan>(&stored).unwrap()
        != parsed.plan
    {
        return Some("the plan changes when it is stored".to_owned());
    }
    // Without its variables the file is refused, and the message names one of them.
    match skypilot::parse_task_file(text, &CommandLineValues::default()) {
        Err(problems) if !required.is_empty() => {
            let named = problems.iter().any(|p| required.iter().any(|name| p.message.contains(*name)));
            (!named).then(|| format!("no variable is named: {problems:?}"))
        }
        Ok(_) if required.is_empty() => None,
        Ok(_) => Some("accepted without its variables".to_owned()),
        Err(problems) => Some(format!("refused without variables: {problems:?}")),
    }
}

/// Converts a service for a server that rents nothing, and for one with a cloud.
fn service_configurations(parsed: &ParsedTaskFile) -> Result<(), String> {
    if !parsed.refusals.is_empty() {
        let named = parsed.refusals.iter().all(|refusal| refusal.hint.is_some());
        return if named { Ok(()) } else { Err(format!("refused without a hint: {:?}", parsed.refusals)) };
    }
    let service = parsed.clone().into_service().map_err(|problems| format!("no service: {problems:?}"))?;
    let settings = ServiceSettings { name: "service".to_owned(), ..ServiceSettings::default() };
    let rented = ServerContext { backends: vec!["aws".to_owned()], ..ServerContext::default() };
    for site in [ServerContext { has_no_spot: true, ..ServerContext::default() }, rented] {
        match service.configurations(&settings, &site) {
            Ok(found) if found.all.is_empty() => return Err("no alternative".to_owned()),
            Ok(_) | Err(ServiceError::UnknownInfra(_)) => {}
            Err(error) => return Err(error.to_string()),
        }
    }
    Ok(())
}

#[test]
fn corpus_task_files_get_the_same_verdict_as_in_skypilot() {
    let corpus = corpus();
    let Some(index) = read(&corpus.join("index.json")) else {
        println!("the corpus is absent ({}): nothing to compare with", corpus.display());
        return;
    };
    let index: Vec<Value> = serde_json::from_str(&index).unwrap();
    let mut wrong = Vec::new();
    for entry in &index {
        let file = entry["file"].as_str().unwrap();
        let text = read(&corpus.join(file)).unwrap();
        wrong.extend(verdict(entry, &text).map(|what| format!("{file}: {what}")));
    }
    println!("{} files, {} wrong", index.len(), wrong.len());
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
}

/// Checks files of this test with their verdicts, in the form of the corpus' index.
#[test]
fn task_file_cases_get_their_expected_verdicts() {
    let cases = [
        (
            r#"{"verdict":"accept","kind":"single","tasks":1,"max_nodes":2,"runnable_locally":true}"#,
            "num_nodes: 2\nrun: hostname\n",
        ),
        (
            r#"{"verdict":"accept","kind":"single","tasks":1,"max_nodes":1,"runnable_locally":true}"#,
            "name: only-a-name\n",
        ),
        (
            r#"{"verdict":"accept","kind":"pipeline","tasks":2,"max_nodes":1,"runnable_locally":true}"#,
            "name: p\n---\nrun: a\n---\n---\nrun: b\n",
        ),
        (
            r#"{"verdict":"accept","kind":"job-group","tasks":2,"max_nodes":1,"runnable_locally":true}"#,
            "name: g\nexecution: parallel\nprimary_tasks: [a]\ntermination_delay: {default: 10s, b: 1m}\n---\nname: a\nrun: a\n---\nname: b\nrun: b\n",
        ),
        (
            r#"{"verdict":"accept","kind":"dag","tasks":2,"max_nodes":1,"runnable_locally":true}"#,
            "name: a\nrun: a\n---\nname: b\ndepends_on: a\nrun: b\n",
        ),
        (
            r#"{"verdict":"accept","kind":"service","tasks":1,"max_nodes":1,"env_required":["TOKEN"]}"#,
            "envs:\n  TOKEN:\nservice: {readiness_probe: /}\nrun: serve\n",
        ),
        (r#"{"verdict":"reject","fields":["resources"]}"#, "resources: {cpus: 1}\nresources: {cpus: 2}\n"),
        (r#"{"verdict":"reject","fields":["runn"]}"#, "runn: typo\n"),
        (r#"{"verdict":"reject","fields":["execution"]}"#, "name: g\nexecution: sideways\n---\nrun: a\n"),
        (r#"{"verdict":"reject","fields":["name"]}"#, "name: g\nexecution: parallel\n---\nrun: a\n"),
        (r#"{"verdict":"reject","fields":["cpus"]}"#, "resources: {cpus: many}\nrun: a\n"),
        // The rules of groups.
        (
            r#"{"verdict":"reject","fields":["name"]}"#,
            "name: g\nexecution: parallel\n---\nname: a\nrun: a\n---\nname: a\nrun: b\n",
        ),
        (
            r#"{"verdict":"reject","fields":["primary_tasks"]}"#,
            "name: g\nexecution: parallel\nprimary_tasks: [b]\n---\nname: a\nrun: a\n",
        ),
        (
            r#"{"verdict":"reject","fields":["termination_delay"]}"#,
            "name: g\nexecution: parallel\ntermination_delay: {b: 1s}\n---\nname: a\nrun: a\n",
        ),
        (
            r#"{"verdict":"reject","fields":["termination_delay"]}"#,
            "name: g\nexecution: parallel\ntermination_delay: soon\n---\nname: a\nrun: a\n",
        ),
    ];
    for (entry, text) in cases {
        let entry: Value = serde_json::from_str(entry).unwrap();
        assert_eq!(verdict(&entry, text), None, "{text}");
    }
}
