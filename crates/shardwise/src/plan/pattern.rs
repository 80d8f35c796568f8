//! Patterns of dotted paths, in the style of shell globs.

use crate::error::{ErrorKind, Result};

/// Whether a dotted path matches a pattern, component by component.
///
/// `*` matches any characters of one component, `?` one character, `[qkv]`, `[0-3]` and `[!q]` one character of a set or
/// outside it, and a component `**` any number of components, also none. `{up,gate}` matches either text, which may contain
/// dots and patterns.
pub(super) fn matches(pattern: &str, path: &str) -> bool {
    if is_exact(pattern) {
        return pattern == path;
    }
    match alternatives(pattern) {
        None => components_match(&split(pattern), &split(path)),
        Some(all) => all.iter().any(|one| matches(one, path)),
    }
}

/// Whether a pattern is a plain path, which matches only itself.
pub(super) fn is_exact(pattern: &str) -> bool {
    !pattern.contains(['*', '?', '[', '{'])
}

/// Checks that the brackets and braces of a pattern are closed and not empty.
pub(super) fn check(pattern: &str) -> Result<()> {
    let bad = |what: &str| {
        let found = format!("pattern `{pattern}` with {what}");
        let needed = "patterns such as `blocks.*.[qkv]`, `layers.[0-3].**` or `mlp.{up,gate}.weight`";
        Err(ErrorKind::Plan.error("sharding plan", found, needed, "close it, or take it out"))
    };
    if let Some(open) = pattern.find('{') {
        let Some(all) = alternatives(pattern) else { return bad("a `{` that is not closed") };
        if pattern[open..].starts_with("{}") {
            return bad("nothing between `{` and `}`");
        }
        return all.iter().try_for_each(|one| check(one));
    }
    for component in split(pattern) {
        let mut rest = component;
        while let Some(open) = rest.find('[') {
            match set(&rest[open + 1..]) {
                None => return bad("a `[` that is not closed inside its component, or has nothing in it"),
                Some((_, after)) => rest = after,
            }
        }
    }
    Ok(())
}

/// Whether a path is inside a module, component by component: `layers.10.up` is not inside `layers.1`.
pub(super) fn is_beneath(path: &str, module: &str) -> bool {
    module.is_empty() && !path.is_empty() || path.strip_prefix(module).is_some_and(|rest| rest.starts_with('.'))
}

/// Splits the path of a field into the path of its module and its name.
pub(super) fn parent(path: &str) -> (&str, &str) {
    path.rsplit_once('.').unwrap_or(("", path))
}

/// The root has no components.
fn split(path: &str) -> Vec<&str> {
    if path.is_empty() { Vec::new() } else { path.split('.').collect() }
}

/// Expands the first pair of braces; `None` if there is none that is closed.
fn alternatives(pattern: &str) -> Option<Vec<String>> {
    let open = pattern.find('{')?;
    let (mut depth, mut start, mut inside) = (0usize, open + 1, Vec::new());
    for (i, letter) in pattern.char_indices().skip_while(|(i, _)| *i < open) {
        match letter {
            '{' => depth += 1,
            ',' if depth == 1 => {
                inside.push(&pattern[start..i]);
                start = i + 1;
            }
            '}' => {
                depth -= 1;
                if depth == 0 {
                    inside.push(&pattern[start..i]);
                    let (before, after) = (&pattern[..open], &pattern[i + 1..]);
                    return Some(inside.iter().map(|one| format!("{before}{one}{after}")).collect());
                }
            }
            _ => {}
        }
    }
    None
}

fn components_match(pattern: &[&str], path: &[&str]) -> bool {
    match (pattern, path) {
        ([], []) => true,
        (["**", rest @ ..], _) => (0..=path.len()).any(|skip| components_match(rest, &path[skip..])),
        ([first, rest @ ..], [name, names @ ..]) => chars_match(first, name) && components_match(rest, names),
        _ => false,
    }
}

fn chars_match(pattern: &str, name: &str) -> bool {
    let Some(first) = pattern.chars().next() else { return name.is_empty() };
    let rest = &pattern[first.len_utf8()..];
    if first == '*' {
        let mut ends = name.char_indices().map(|(i, _)| i).chain([name.len()]);
        return ends.any(|i| chars_match(rest, &name[i..]));
    }
    let Some(letter) = name.chars().next() else { return false };
    let names = &name[letter.len_utf8()..];
    match (first, set(rest)) {
        ('?', _) => chars_match(rest, names),
        ('[', Some((inside, after))) => is_in(inside, letter) && chars_match(after, names),
        _ => first == letter && chars_match(rest, names),
    }
}

/// Splits after an opening bracket: the set inside, and the rest after the closing bracket.
fn set(behind_open: &str) -> Option<(&str, &str)> {
    behind_open.split_once(']').filter(|(inside, _)| !inside.is_empty() && *inside != "!")
}

/// Whether a character is in a set such as `qkv`, `0-3` or `!q`.
fn is_in(set: &str, letter: char) -> bool {
    let (outside, set) = set.strip_prefix('!').map_or((false, set), |set| (true, set));
    let all: Vec<char> = set.chars().collect();
    let (mut i, mut found) = (0, false);
    while i < all.len() {
        if let [low, '-', high] = all[i..all.len().min(i + 3)] {
            found |= (low..=high).contains(&letter);
            i += 3;
        } else {
            found |= all[i] == letter;
            i += 1;
        }
    }
    found != outside
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn patterns_go_component_by_component() {
        for (pattern, path, fits) in [
            ("layers.*.up", "layers.10.up", true),
            ("layers.*.up", "layers.10.mlp.up", false),
            ("layers.1*.up", "layers.10.up", true),
            ("**.weight", "weight", true),
            ("**.weight", "a.b.weight", true),
            ("a.**", "a", true),
            ("*", "a.b", false),
            ("", "", true),
            ("*", "", false),
            ("**", "", true),
            ("*e*o*", "embedding_of", true),
            ("a*a", "a", false),
        ] {
            assert_eq!(matches(pattern, path), fits, "{pattern} {path}");
        }
        assert!(is_beneath("layers.1.up", "layers.1") && is_beneath("up", ""));
        assert!(!is_beneath("layers.10.up", "layers.1") && !is_beneath("layers.1", "layers.1") && !is_beneath("", ""));
    }

    #[test]
    fn sets_ranges_single_letters_and_alternatives() {
        for (pattern, path, fits) in [
            ("blocks.*.[qkv]_proj", "blocks.3.k_proj", true),
            ("blocks.*.[qkv]_proj", "blocks.3.o_proj", false),
            ("layers.[1-2].up", "layers.2.up", true),
            ("layers.[1-2].up", "layers.3.up", false),
            ("layers.[1-2].up", "layers.12.up", false),
            ("layers.1[0-25].up", "layers.15.up", true),
            ("[!q]", "k", true),
            ("[!q]", "q", false),
            ("[a-]", "-", true),
            ("layer?", "layer7", true),
            ("layer?", "layer", false),
            ("layer?", "layer10", false),
            ("?", ".", false),
            ("mlp.{up,gate}.weight", "mlp.gate.weight", true),
            ("mlp.{up,gate}.weight", "mlp.down.weight", false),
            ("{attention.{query,key},mlp.up}.weight", "attention.key.weight", true),
            ("{attention.{query,key},mlp.up}.weight", "mlp.up.weight", true),
            ("{attention.{query,key},mlp.up}.weight", "attention.up.weight", false),
            ("up{,.bias}", "up", true),
            ("{**.up,down}.[wb]*", "a.b.up.bias", true),
            ("é?", "éü", true),
        ] {
            assert!(check(pattern).is_ok(), "{pattern}");
            assert!(!is_exact(pattern), "{pattern}");
            assert_eq!(matches(pattern, path), fits, "{pattern} {path}");
        }
        for bad in ["[qkv", "a.[q.b]", "[]", "[!]", "{a,b", "{}", "{a,[q}"] {
            let error = check(bad).unwrap_err().to_string();
            assert!(error.contains(bad) || bad == "{a,[q}", "{error}");
        }
    }
}
