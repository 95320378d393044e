//! Settings that are valid elsewhere and not supported here: refused or warned about, never dropped.

use windlass_model::config::{
    Configuration, parse, parse_profiles,
    unsupported::{ReviewContext, SupportReview, review, review_profile},
};

fn reviewed(text: &str, project: Option<&str>) -> SupportReview {
    let parsed = parse(text).unwrap();
    review(
        &parsed.configuration,
        ReviewContext { node: Some(&parsed.node), project, ..ReviewContext::default() },
    )
}

/// Returns the only refusal of a file: its line, its path and its message.
fn refusal(text: &str) -> String {
    let found = reviewed(text, Some("main"));
    assert!(found.warnings.is_empty(), "{found:?}");
    let [one] = found.refusals.as_slice() else { panic!("{text}: {found:?}") };
    assert!(one.hint.is_some(), "what to do instead: {one}");
    format!("{}: {one}", one.span.start.line)
}

fn warning(text: &str) -> String {
    let found = reviewed(text, Some("main"));
    assert!(found.refusals.is_empty(), "{found:?}");
    let [one] = found.warnings.as_slice() else { panic!("{text}: {found:?}") };
    format!("{}: {one}", one.span.start.line)
}

const TASK: &str = "type: task\ncommands: [x]\n";
const SERVICE: &str = "type: service\nport: 80\n";
const GATEWAY: &str = "type: gateway\nname: entry\nbackend: remote\nregion: here\n";

#[test]
fn unsupported_fields_are_refused_with_their_line_and_a_hint() {
    for (text, part) in [
        (format!("{TASK}dstack: true\n"), "3: dstack: `dstack: true` is not supported"),
        (
            format!("{SERVICE}commands: [x]\nmodel: {{name: m, format: tgi}}\n"),
            "4: model.format: `format: tgi` is not supported",
        ),
        (
            format!("{SERVICE}groups:\n- {{commands: [x], replicas: 1, router: {{type: smg}}}}\n"),
            "3: groups[0].router: `router` is not supported",
        ),
        (format!("{GATEWAY}instance_type: t3.small\n"), "5: instance_type: `instance_type` is not supported"),
        (
            GATEWAY.replace("remote", "aws") + "load_balancer: {type: alb}\n",
            "5: load_balancer: `load_balancer` is not supported",
        ),
        (
            GATEWAY.replace("remote", "aws") + "certificate: {type: acm, arn: a}\n",
            "5: certificate.type: a certificate of type `acm` is not supported",
        ),
    ] {
        let message = refusal(&text);
        assert!(message.starts_with(part), "{message}");
    }
}

#[test]
fn fleets_and_gateways_of_another_project_are_refused() {
    for (text, part) in [
        (format!("{TASK}fleets: [other/gpus]\n"), "fleets[0]: `other/gpus` is a fleet of another project"),
        (
            format!("{TASK}instances: [{{fleet: other/gpus, instance: 0}}]\n"),
            "instances[0].fleet: `other/gpus` is a fleet of another project",
        ),
        (
            format!("{SERVICE}commands: [x]\ngateway: other/entry\n"),
            "gateway: `other/entry` is a gateway of another project",
        ),
    ] {
        let message = refusal(&text);
        assert!(message.contains(part) && message.contains("not exported to `main`"), "{message}");
        let own = text.replace("other/", "main/");
        assert_eq!(reviewed(&own, Some("main")), SupportReview::default(), "{own}");
        assert_eq!(reviewed(&text, None), SupportReview::default(), "nobody knows the project yet");
    }
}

#[test]
fn a_field_without_effect_gives_one_warning() {
    let options = "backend_options: [{type: vastai, min_score: 5}]\n";
    for (text, part) in [
        (format!("{TASK}{options}"), "3: backend_options: `backend_options` has no effect"),
        (format!("{TASK}home_dir: /home/me\n"), "3: home_dir: `home_dir` has no effect"),
        (format!("{TASK}image: none\nprivileged: true\n"), "4: privileged: `privileged` has no effect"),
        (
            format!("{TASK}image: none\nregistry_auth: {{username: a, password: b}}\n"),
            "4: registry_auth: `registry_auth` has no effect",
        ),
        (format!("type: fleet\nnodes: 1\n{options}"), "3: backend_options: `backend_options` has no effect"),
        (
            format!("{GATEWAY}certificate: null\npublic_ip: false\n"),
            "6: public_ip: `public_ip` has no effect",
        ),
        (
            "type: fleet\nssh_config: {user: u, identity_file: f, hosts: [h]}\nresources: {cpu: 2}\n"
                .to_owned(),
            "3: resources: `resources` has no effect with `ssh_config`",
        ),
        (
            "type: task\ngroups: [{commands: [x]}]\nresources: {cpu: 2}\n".to_owned(),
            "3: resources: `resources` has no effect with `groups`",
        ),
        ("type: fleet\nnodes: 1\nretry: true\n".to_owned(), "3: retry: `retry` of a fleet has no effect"),
        (
            format!("{SERVICE}commands: [x]\nstartup_order: master-first\n"),
            "4: startup_order: `startup_order` has no effect",
        ),
        (
            "type: dev-environment\nstop_criteria: master-done\n".to_owned(),
            "2: stop_criteria: `stop_criteria` has no effect",
        ),
        (
            "type: dev-environment\nide: vscode\nversion: 1.80.0\n".to_owned(),
            "3: version: `version` has no effect",
        ),
        (
            "type: service\ncommands: [x]\nport: 8080:80\n".to_owned(),
            "3: port: the local part of `port` has no effect",
        ),
    ] {
        let message = warning(&text);
        assert!(message.starts_with(part), "{message}");
    }
    let profiles = parse_profiles(&format!("profiles:\n- name: a\n  {options}")).unwrap();
    assert_eq!(review_profile(&profiles.profiles[0].properties).warnings.len(), 1);
}

#[test]
fn defaults_sent_by_other_clients_give_no_warning_or_refusal() {
    let sent = serde_json::json!({
        "type": "task", "commands": ["x"], "dstack": false, "home_dir": "/root", "backend_options": null, "fleets": null,
    });
    let configuration = Configuration::from_json(&sent).unwrap();
    assert_eq!(review(&configuration, ReviewContext::default()), SupportReview::default());
}

#[test]
fn a_profile_is_reviewed_like_the_run_configuration() {
    let profiles = parse_profiles("profiles:\n- name: a\n  fleets: [other/gpus]\n").unwrap();
    let parsed = parse(TASK).unwrap();
    let properties = Some(&profiles.profiles[0].properties);
    let found = review(
        &parsed.configuration,
        ReviewContext { project: Some("main"), properties, ..ReviewContext::default() },
    );
    assert_eq!(found.refusals.len(), 1, "{found:?}");
}
