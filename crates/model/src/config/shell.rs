//! Shell syntax: splitting a command line, quoting an argument, joining commands.

/// Splits a line as a POSIX shell does, without expansion.
pub fn split(line: &str) -> Result<Vec<String>, &'static str> {
    let mut words = Vec::new();
    let mut word: Option<String> = None;
    let mut chars = line.chars();
    while let Some(c) = chars.next() {
        match c {
            c if c.is_whitespace() => words.extend(word.take()),
            '\'' => {
                let word = word.get_or_insert_default();
                loop {
                    match chars.next() {
                        Some('\'') => break,
                        Some(c) => word.push(c),
                        None => return Err("a single quote is not closed"),
                    }
                }
            }
            '"' => {
                let word = word.get_or_insert_default();
                loop {
                    match chars.next() {
                        Some('"') => break,
                        Some('\\') => match chars.next() {
                            Some(c @ ('"' | '\\' | '$' | '`')) => word.push(c),
                            Some(c) => word.extend(['\\', c]),
                            None => return Err("a double quote is not closed"),
                        },
                        Some(c) => word.push(c),
                        None => return Err("a double quote is not closed"),
                    }
                }
            }
            '\\' => match chars.next() {
                Some(c) => word.get_or_insert_default().push(c),
                None => return Err("nothing follows the last backslash"),
            },
            c => word.get_or_insert_default().push(c),
        }
    }
    words.extend(word);
    Ok(words)
}

/// Quotes an argument so that a shell reads it back unchanged.
pub fn quote(word: &str) -> String {
    let safe = |b: u8| b.is_ascii_alphanumeric() || b"@%+=:,./-_".contains(&b);
    if !word.is_empty() && word.bytes().all(safe) {
        return word.to_owned();
    }
    format!("'{}'", word.replace('\'', "'\"'\"'"))
}

/// Joins commands with `&&`. A command that ends in `&` is grouped, since the list would end there otherwise.
pub fn join(commands: &[String]) -> String {
    let joined: Vec<String> = commands
        .iter()
        .map(|command| {
            let command = command.trim();
            if command.ends_with('&') && !command.ends_with("&&") {
                format!("{{ {command} }}")
            } else {
                command.to_owned()
            }
        })
        .collect();
    joined.join(" && ")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_line_is_split_as_a_shell_splits_it() {
        let cases: [(&str, &[&str]); 6] = [
            ("a  b\tc", &["a", "b", "c"]),
            ("'a b' \"c d\"", &["a b", "c d"]),
            (r#"a\ b "c\"d" "e\f""#, &["a b", "c\"d", "e\\f"]),
            ("''", &[""]),
            ("pre'fix'ed", &["prefixed"]),
            ("", &[]),
        ];
        for (line, words) in cases {
            assert_eq!(split(line).unwrap(), words, "{line}");
        }
        assert!(split("'open").is_err() && split("\"open").is_err() && split("end\\").is_err());
    }

    #[test]
    fn quoting_then_splitting_returns_the_same_word() {
        for word in ["", "plain", "two words", "it's", "$HOME `x` \"q\"", "new\nline"] {
            assert_eq!(split(&quote(word)).unwrap(), [word]);
        }
    }

    #[test]
    fn a_background_command_is_grouped() {
        let commands = ["serve &", "sleep 3", "fg"].map(str::to_owned);
        assert_eq!(join(&commands), "{ serve & } && sleep 3 && fg");
    }
}
