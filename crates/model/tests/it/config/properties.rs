//! Properties that hold for all inputs.

use proptest::prelude::*;
use windlass_model::config::{
    self, Configuration,
    interpolate::{self, DollarEscape, Substitution},
    name::UnixUser,
    ports::PortMapping,
    quantities::{parse_duration, parse_memory, parse_range},
    resources::{parse_cpu, parse_gpu},
    shell, yaml, yaml_scalars,
};

proptest! {
    #[test]
    fn a_range_parses_to_its_bounds_and_a_reversed_one_is_refused(min in 0u32..1000, more in 0u32..1000, shape in 0..4) {
        let max = min + more;
        let (text, low, high) = match shape {
            0 => (format!("{min}"), Some(min), Some(min)),
            1 => (format!("{min}.."), Some(min), None),
            2 => (format!("..{max}"), None, Some(max)),
            _ => (format!(" {min} .. {max} "), Some(min), Some(max)),
        };
        let range = parse_range::<u32>(&text).unwrap();
        prop_assert_eq!((range.min, range.max), (low, high));
        let turned = format!("{max}..{min}");
        prop_assert!(more == 0 || parse_range::<u32>(&turned).is_err());
    }

    #[test]
    fn a_duration_is_its_number_times_its_unit(n in 0i64..1_000_000, unit in 0usize..5) {
        let (word, secs) = [("s", 1), ("m", 60), ("h", 3600), ("d", 86400), ("w", 604_800)][unit];
        prop_assert_eq!(parse_duration(&format!("{n}{word}")).unwrap(), n * secs);
        prop_assert_eq!(parse_duration(&n.to_string()).unwrap(), n);
    }

    #[test]
    fn sizes_agree_across_units(mb in 1u32..4_000_000) {
        let gb = parse_memory(&format!("{mb}MB")).unwrap();
        prop_assert!((gb * 1024.0 - f64::from(mb)).abs() < 1e-6);
        prop_assert_eq!(parse_memory(&format!("{mb}TB")).unwrap(), f64::from(mb) * 1024.0);
    }

    #[test]
    fn a_port_mapping_parses_to_its_ports(local in proptest::option::of(1u16..), container in 1u16..) {
        let text = format!("{}:{container}", local.map_or("*".to_owned(), |port| port.to_string()));
        let mapping = PortMapping::parse(&text).unwrap();
        prop_assert_eq!((mapping.local_port, mapping.container_port), (local, container));
    }

    #[test]
    fn escaped_text_comes_back_as_it_was(text in ".{0,60}") {
        let escaped = interpolate::escape(&text);
        let back = interpolate::substitute(&escaped, DollarEscape::Unescape, |_| Err("no reference is left".to_owned()));
        prop_assert_eq!(back.unwrap(), text);
    }

    #[test]
    fn a_substituted_value_is_never_interpolated_again(secret in ".{0,40}") {
        let out = interpolate::substitute("a ${{ secrets.X }} b", DollarEscape::Unescape, |_| Ok(Substitution::Value(secret.clone())));
        prop_assert_eq!(out.unwrap(), format!("a {secret} b"));
    }

    #[test]
    fn keeping_every_reference_leaves_the_text_unchanged(text in "[a$\\{\\} .x]{0,40}") {
        if let Ok(out) = interpolate::substitute(&text, DollarEscape::Keep, |_| Ok(Substitution::Keep)) {
            prop_assert_eq!(out, text);
        }
    }

    #[test]
    fn quoted_words_survive_a_shell(words in proptest::collection::vec(".{0,20}", 0..5)) {
        let line: Vec<String> = words.iter().map(|word| shell::quote(word)).collect();
        prop_assert_eq!(shell::split(&line.join(" ")).unwrap(), words);
    }

    #[test]
    fn value_parsers_never_panic(text in ".{0,40}") {
        let _ = parse_range::<u32>(&text);
        let _ = parse_range::<f64>(&text);
        let _ = parse_duration(&text);
        let _ = parse_memory(&text);
        let _ = parse_cpu(&text);
        let _ = parse_gpu(&text);
        let _ = PortMapping::parse(&text);
        let _ = UnixUser::parse(&text);
        let _ = yaml_scalars::resolve_scalar(&text);
        let _ = shell::split(&text);
        let _ = interpolate::split_pieces(&text);
        let _ = config::profile::parse_cron(&text);
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(512))]

    #[test]
    fn arbitrary_text_never_panics(text in "(?s).{0,200}") {
        if let Err(problems) = config::parse(&text) {
            prop_assert!(!problems.is_empty());
            let _ = config::render(&problems, "x", &text);
        }
    }

    #[test]
    fn text_that_looks_like_yaml_never_panics(text in "([-?:,\\[\\]{}#&*!|>'\"%@` \n\tab01.~<$]|: |- |\\? |type: task\n|\\$\\{\\{|<<: ){0,60}") {
        if let Err(problems) = config::parse(&text) {
            let _ = config::render(&problems, "x", &text);
        }
        let _ = config::parse(&format!("type: task\ncommands: [x]\n{text}"));
    }

    #[test]
    fn json_reads_the_same_as_yaml(name in "[a-z][a-z0-9-]{1,10}", commands in proptest::collection::vec("[ -~]{1,20}", 1..4), nodes in 1u32..5, gpus in 0u32..9) {
        let json = serde_json::json!({
            "type": "task", "name": name, "nodes": nodes,
            "commands": commands.iter().map(|command| interpolate::escape(command)).collect::<Vec<_>>(),
            "resources": {"gpu": gpus},
        });
        let from_json = Configuration::from_json(&json).unwrap();
        let from_yaml = config::parse(&json.to_string()).unwrap().configuration;
        prop_assert_eq!(&from_json, &from_yaml);
        let printed = serde_json::to_value(&from_json).unwrap();
        prop_assert_eq!(Configuration::from_json(&printed).unwrap(), from_json);
    }

    #[test]
    fn small_nested_lists_are_accepted(depth in 1usize..5, width in 1usize..6) {
        let mut text = "x".to_owned();
        for _ in 0..depth {
            text = format!("[{}]", vec![text; width].join(", "));
        }
        prop_assert!(yaml::read(&text).is_ok());
    }
}
