//! Files that attempt to exhaust time or memory.

use windlass_model::config::{
    self,
    error::Code,
    yaml::{self, BYTES_MAX, NODES_MAX},
};

#[track_caller]
fn refused(text: &str, code: Code) {
    let diagnosis = yaml::read(text).unwrap_err();
    assert_eq!(diagnosis.code, code, "{diagnosis:?}");
    assert!(config::parse(text).is_err());
}

#[test]
fn an_alias_bomb_is_refused_before_it_is_expanded() {
    let mut text = "a0: &a0 [x, x, x, x, x, x, x, x, x, x]\n".to_owned();
    for level in 1..40 {
        let previous = level - 1;
        let items = vec![format!("*a{previous}"); 10].join(", ");
        text.push_str(&format!("a{level}: &a{level} [{items}]\n"));
    }
    refused(&text, Code::TooLarge);
    let diagnosis = yaml::read(&text).unwrap_err();
    assert!(diagnosis.span.start.line <= 6, "stopped at line {}", diagnosis.span.start.line);
}

#[test]
fn a_flat_list_of_aliases_counts_toward_the_size_limit() {
    let text = |times: usize| format!("a: &a [{}]\nb: [{}]", "x, ".repeat(1000), "*a, ".repeat(times));
    assert!(yaml::read(&text(50)).is_ok());
    refused(&text(200), Code::TooLarge);
}

#[test]
fn merge_keys_count_toward_the_size_limit() {
    let mut text = "m0: &m0 {a: 1, b: 2}\n".to_owned();
    for level in 1..30 {
        let previous = level - 1;
        text.push_str(&format!(
            "m{level}: &m{level} {{x{level}: *m{previous}, y{level}: *m{previous}, <<: *m{previous}}}\n"
        ));
    }
    refused(&text, Code::TooLarge);
}

#[test]
fn an_alias_cannot_contain_itself() {
    assert!(yaml::read("a: &a [*a]").is_err());
    assert!(yaml::read("a: *nobody").is_err());
}

#[test]
fn nesting_depth_is_limited_in_every_yaml_notation() {
    for deep in ["[", "{a: ", "- "] {
        refused(&format!("a:\n  {}", deep.repeat(100_000)), Code::TooLarge);
    }
    refused(&format!("a:\n  {}", "? ".repeat(100_000)), Code::UnsupportedYaml);
    let mut nested = String::new();
    for level in 0..200 {
        nested.push_str(&format!("{}a:\n", " ".repeat(level)));
    }
    refused(&nested, Code::TooLarge);
    let mut chain = "a0: &a0 [x]\n".to_owned();
    for level in 1..100 {
        chain.push_str(&format!("a{level}: &a{level} [*a{}]\n", level - 1));
    }
    refused(&chain, Code::TooLarge);
}

#[test]
fn bytes_and_values_are_bounded() {
    refused(&"#".repeat(BYTES_MAX + 1), Code::TooLarge);
    let mut keys = String::new();
    for n in 0..=NODES_MAX / 2 {
        keys.push_str(&format!("{n:x}: \n"));
    }
    assert!(keys.len() < BYTES_MAX);
    refused(&keys, Code::TooLarge);
    refused(&format!("a: [{}]", "1,".repeat(NODES_MAX)), Code::TooLarge);
}

#[test]
fn input_other_than_one_plain_yaml_document_is_refused() {
    refused("type: task\n---\ntype: task", Code::UnsupportedYaml);
    refused("type: !!str task", Code::UnsupportedYaml);
    refused("!x {type: task}", Code::UnsupportedYaml);
    refused("type: !<tag:x,1:y> [1]", Code::UnsupportedYaml);
    refused("a\0b: 1", Code::UnsupportedYaml);
    refused("? [a]\n: b", Code::UnsupportedYaml);
    refused("{a: 1, a: 2}", Code::DuplicateKey);
    let utf16: Vec<u8> =
        [0xff, 0xfe].into_iter().chain("type: task".encode_utf16().flat_map(u16::to_le_bytes)).collect();
    let message = yaml::read_bytes(&utf16).unwrap_err().message;
    assert!(message.contains("UTF-16"), "{message}");
    assert_eq!(yaml::read_bytes(b"a: 1\nb: \xff").unwrap_err().span.start.line, 2);
}

#[test]
fn a_byte_order_mark_changes_nothing() {
    let plain = config::parse("type: task\ncommands: [x]").unwrap();
    let marked = config::parse("\u{feff}type: task\ncommands: [x]").unwrap();
    assert_eq!(plain.configuration, marked.configuration);
    let problem = &config::parse("\u{feff}tpye: task").unwrap_err()[0];
    assert_eq!((problem.span.start.line, problem.span.start.column), (1, 1));
}

#[test]
fn nan_infinity_and_non_numbers_are_refused_as_numbers() {
    let with = |value: &str| format!("type: task\ncommands: [x]\nmax_price: {value}");
    for value in [".nan", ".inf", "-.inf", "1e999", "0x", "no"] {
        assert!(config::parse(&with(value)).is_err(), "{value}");
    }
    let octal = config::parse("type: task\ncommands: [x]\npriority: 010").unwrap();
    assert_eq!(octal.configuration.run().unwrap().priority.unwrap().get(), 8);
}

/// A coarse time limit, far above what is needed; the counts above are the real proof.
#[test]
#[expect(clippy::disallowed_methods, clippy::disallowed_types, reason = "a test may look at the clock")]
fn hostile_documents_are_parsed_within_the_time_limit() {
    let mut scalars = String::new();
    for n in 0..200_000 {
        scalars.push_str(&format!("a{n}:\n"));
    }
    for text in [
        "[".repeat(BYTES_MAX),
        "- ".repeat(BYTES_MAX / 2),
        "{a: ".repeat(BYTES_MAX / 4),
        "&a ".repeat(BYTES_MAX / 3),
        "*a ".repeat(BYTES_MAX / 3),
        "a: b: ".repeat(BYTES_MAX / 6),
        "\"".repeat(BYTES_MAX),
        "'".repeat(BYTES_MAX),
        "%".repeat(BYTES_MAX),
        "? ".repeat(BYTES_MAX / 2),
        "\n".repeat(BYTES_MAX),
        " ".repeat(BYTES_MAX),
        "- |\n".repeat(BYTES_MAX / 4),
        "!a".repeat(BYTES_MAX / 2),
        "a\n".repeat(BYTES_MAX / 2),
        "\t- :\n".repeat(BYTES_MAX / 5),
        scalars,
        format!("type: task\n{}", (0..10_000).map(|n| format!("key{n}: 1\n")).collect::<String>()),
        format!("type: task\ncommands: ['{}']", "${{ a.b }}".repeat(10_000)),
        format!("type: task\nports: [{}]", "0,".repeat(10_000)),
        format!("type: task\nenv: [{}]", "1=,".repeat(10_000)),
        format!("type: service\nport: 1\nimage: a\nprobes: [{}]", "{type: http},".repeat(10_000)),
        format!("type: service\nport: 1\nimage: a\nrate_limits: [{}]", "{rps: 1},".repeat(10_000)),
        format!("type: task\ngroups: [{}]", "{nodes: 1},".repeat(10_000)),
    ] {
        let before = std::time::Instant::now();
        if let Err(problems) = config::parse(&text) {
            assert!(problems.len() <= 101);
            let _ = config::render(&problems, "x", &text);
        }
        let took = before.elapsed();
        assert!(took.as_secs() < 5, "{took:?} for {:?}", text.chars().take(12).collect::<String>());
    }
}
