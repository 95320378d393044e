//! `${{ … }}`: replaced once, only where it is allowed.

use windlass_model::config::interpolate::{
    DollarEscape, Reference, Substitution, references, split_pieces, substitute,
};

use super::{accept, refuse};

fn put(text: &str) -> Result<String, String> {
    let known = |reference: &Reference| match reference.to_string().as_str() {
        "run.args" => Ok(Substitution::Value("'a b' $X ${{ secrets.Y }}".to_owned())),
        "secrets.X" => Ok(Substitution::Keep),
        "groups[0].nodes[1].IP_ADDRESS" => Ok(Substitution::Value("10.0.0.2".to_owned())),
        other => Err(format!("unknown {other}")),
    };
    substitute(text, DollarEscape::Unescape, known)
        .map_err(|error| format!("{}+{}: {}", error.at, error.len, error.reason))
}

#[test]
fn references_are_replaced_in_one_pass() {
    let cases = [
        ("no reference", "no reference"),
        ("${{ run.args }}", "'a b' $X ${{ secrets.Y }}"),
        ("${{run.args}}!", "'a b' $X ${{ secrets.Y }}!"),
        ("$X ${X} $(x)", "$X ${X} $(x)"),
        ("$$X", "$X"),
        ("$${{ run.args }}", "${{ run.args }}"),
        ("$$$${{", "$${{"),
        ("${{ secrets.X }}", "${{ secrets.X }}"),
        ("${{ groups[0].nodes[1].IP_ADDRESS }}:80", "10.0.0.2:80"),
        ("é ${{\trun.args\n}}", "é 'a b' $X ${{ secrets.Y }}"),
        ("end $", "end $"),
    ];
    for (text, expected) in cases {
        assert_eq!(put(text).unwrap(), expected, "{text}");
    }
}

#[test]
fn invalid_references_report_their_position() {
    let cases = [
        ("ab ${{ run.args", "3+3: `${{` has no closing `}}`"),
        ("${{ }}", "0+6: `` is not of the form `namespace.name`"),
        ("x ${{ a.b.c }}", "2+12: `a.b.c` is not of the form `namespace.name`"),
        ("${{ a b }}", "0+10: `a b` is not of the form `namespace.name`"),
        ("${{ my-ns.x }}", "0+14: `my-ns.x` is not of the form `namespace.name`"),
        ("${{ env.X }}", "0+12: unknown env.X"),
    ];
    for (text, expected) in cases {
        assert_eq!(put(text).unwrap_err(), expected, "{text}");
    }
    assert!(put("${{ groups[0].nodes[x].IP_ADDRESS }}").is_err());
    assert!(put("${{ groups[0].nodes[99999999999].IP_ADDRESS }}").is_err());
}

#[test]
fn references_lists_every_reference_in_order() {
    let found = references("a ${{ env.A }} $$ ${{ groups[1].replicas[0].IP_ADDRESS }}").unwrap();
    let found: Vec<String> = found.iter().map(ToString::to_string).collect();
    assert_eq!(found, ["env.A", "groups[1].replicas[0].IP_ADDRESS"]);
    assert_eq!(split_pieces("").unwrap(), []);
}

#[test]
fn each_reference_namespace_is_allowed_only_in_its_fields() {
    let with = |more: &str| format!("type: service\nport: 1\nimage: a\n{more}");
    accept(&with("commands: ['x ${{ run.args }} ${{ secrets.A }}']"));
    accept(&with(
        "env: ['A=${{ secrets.A }}']\nregistry_auth: {username: '${{ env.U }}', password: '${{ secrets.P }}'}",
    ));
    accept(&with("probes: [{type: http, url: '/${{ env.X }}'}]\nvolumes: ['v-${{ dstack.node_rank }}:/v']"));
    assert_eq!(refuse(&with("commands: ['${{ env.X }}']")), ["C018 commands[0]"]);
    assert_eq!(refuse(&with("commands: ['${{ run.arg }}']")), ["C018 commands[0]"]);
    assert_eq!(refuse(&with("env: {A: '${{ env.X }}', B: '${{ open'}")), ["C018 env.A", "C018 env.B"]);
    assert_eq!(refuse(&with("env: {A: '${{ groups[0].replicas[0].IP_ADDRESS }}'}")), ["C018 env.A"]);
    assert_eq!(refuse(&with("volumes: ['v-${{ dstack.rank }}:/v']")), ["C018 volumes[0]"]);
    assert_eq!(refuse(&with("probes: [{type: http, url: '/${{ secrets.X }}'}]")), ["C018 probes[0].url"]);
    accept("type: gateway\nbackend: aws\nregion: r\ndomain: '${{ run.project_name }}.x.org'");
    assert_eq!(refuse("type: gateway\nbackend: aws\nregion: r\ndomain: '${{ run.args }}'"), ["C018 domain"]);
}

#[test]
fn address_references_must_name_an_existing_group_member() {
    let task = |address: &str| {
        format!(
            "type: task\ngroups: [{{nodes: 2, commands: [x]}}, {{commands: ['ping ${{{{ {address} }}}}']}}]"
        )
    };
    accept(&task("groups[0].nodes[1].IP_ADDRESS"));
    for bad in
        ["groups[0].nodes[2].IP_ADDRESS", "groups[2].nodes[0].IP_ADDRESS", "groups[0].replicas[0].IP_ADDRESS"]
    {
        assert_eq!(refuse(&task(bad)), ["C018 groups[1].commands[0]"], "{bad}");
    }
    assert_eq!(
        refuse("type: task\ncommands: ['${{ groups[0].nodes[0].IP_ADDRESS }}']"),
        ["C018 commands[0]"]
    );
    let service = |member: u32| {
        format!(
            "type: service\nport: 1\nreplicas: [{{count: 1..2, commands: ['x ${{{{ groups[0].replicas[{member}].IP_ADDRESS }}}}'], scaling: {{metric: rps, target: 1}}}}]"
        )
    };
    accept(&service(0));
    assert_eq!(refuse(&service(1)), ["C018 groups[0].commands[0]"]);
}
