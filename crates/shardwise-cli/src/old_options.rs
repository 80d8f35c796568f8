//! Earlier spellings of options. They keep working for one release and print a note that names the new spelling.

use std::ffi::OsString;
use std::io::Write;

use crate::processes;

/// The command, the earlier spelling and the present one.
const OLD_OPTIONS: [(&str, &str, &str); 10] = [
    ("train", "width", "d-model"),
    ("train", "hidden", "d-ff"),
    ("train", "key-heads", "kv-heads"),
    ("train", "length", "seq-len"),
    ("train", "batch", "batch-size"),
    ("train", "clip", "clip-grad-norm"),
    ("train", "master", "master-weights"),
    ("generate", "top", "top-k"),
    ("generate", "tokens", "max-tokens"),
    ("bench", "times", "repeats"),
];

/// The arguments with earlier spellings replaced by the present ones.
pub(crate) fn replaced(arguments: impl Iterator<Item = OsString>) -> Vec<OsString> {
    let mut arguments: Vec<OsString> = arguments.collect();
    let command = arguments.get(1).and_then(|command| command.to_str()).unwrap_or_default().to_owned();
    // After `--` there are no options.
    for argument in arguments.iter_mut().skip(2).take_while(|argument| *argument != "--") {
        let Some((name, value)) = argument.to_str().and_then(|text| text.strip_prefix("--")).map(split_value) else {
            continue;
        };
        if let Some(new) = new_spelling(&command, name) {
            note(&format!("--{name}"), &format!("--{new}"));
            *argument = format!("--{new}{value}").into();
        }
    }
    arguments
}

/// Prints a note for every earlier spelling among the keys of a configuration file of `train`, which accepts both.
pub(crate) fn note_keys<'a>(keys: impl Iterator<Item = &'a String>) {
    for (key, new) in keys.filter_map(|key| Some((key, new_spelling("train", key)?))) {
        note(&format!("the key `{key}`"), &format!("`{new}`"));
    }
}

fn new_spelling(command: &str, name: &str) -> Option<&'static str> {
    OLD_OPTIONS.iter().find(|(of, old, _)| (*of, *old) == (command, name)).map(|(_, _, new)| *new)
}

/// The name of an option, and its value with the `=` before it.
fn split_value(option: &str) -> (&str, &str) {
    option.split_at(option.find('=').unwrap_or(option.len()))
}

fn note(old: &str, new: &str) {
    if processes::is_first() {
        // The command goes on if nobody reads the note.
        let _ = writeln!(std::io::stderr(), "note: {old} is now {new}; the old spelling works until the next release");
    }
}

#[test]
fn earlier_spellings_become_the_present_ones() {
    let ours = |line: &str| {
        let new = replaced(line.split(' ').map(OsString::from));
        new.into_iter().map(|argument| argument.into_string().unwrap()).collect::<Vec<_>>().join(" ")
    };
    assert_eq!(
        ours("shardwise train --width 8 --clip=2 -- --width"),
        "shardwise train --d-model 8 --clip-grad-norm=2 -- --width"
    );
    assert_eq!(ours("shardwise generate --top 3 --width"), "shardwise generate --top-k 3 --width");
    assert_eq!(ours("shardwise train --d-model 8"), "shardwise train --d-model 8");
}
