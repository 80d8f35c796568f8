//! Paths and patterns of paths.

/// Whether a dotted path fits a pattern. Components are compared one by one: `*` stands for any letters of one of them,
/// and a component `**` for any number of components, none included.
pub(super) fn matches(pattern: &str, path: &str) -> bool {
    components(&split(pattern), &split(path))
}

/// Whether a pattern fits one path only: itself.
pub(super) fn is_exact(pattern: &str) -> bool {
    !pattern.contains('*')
}

/// Whether a path lies inside a module, component by component: `layers.1` is not inside `layers.10`.
pub(super) fn is_beneath(path: &str, module: &str) -> bool {
    module.is_empty() && !path.is_empty() || path.strip_prefix(module).is_some_and(|rest| rest.starts_with('.'))
}

/// The module that a parameter or a field belongs to, and its name there.
pub(super) fn parent(path: &str) -> (&str, &str) {
    path.rsplit_once('.').unwrap_or(("", path))
}

/// The root has no components.
fn split(path: &str) -> Vec<&str> {
    if path.is_empty() { Vec::new() } else { path.split('.').collect() }
}

fn components(pattern: &[&str], path: &[&str]) -> bool {
    match (pattern, path) {
        ([], []) => true,
        (["**", rest @ ..], _) => (0..=path.len()).any(|skip| components(rest, &path[skip..])),
        ([first, rest @ ..], [name, names @ ..]) => letters(first, name) && components(rest, names),
        _ => false,
    }
}

fn letters(pattern: &str, name: &str) -> bool {
    match pattern.split_once('*') {
        None => pattern == name,
        Some((before, after)) => name.strip_prefix(before).is_some_and(|rest| {
            let ends = rest.char_indices().map(|(i, _)| i).chain([rest.len()]);
            ends.into_iter().any(|i| letters(after, &rest[i..]))
        }),
    }
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
}
