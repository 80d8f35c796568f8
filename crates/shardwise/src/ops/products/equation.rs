//! Einsum equations: the dimensions of every operand and of the result by label.

use std::fmt;
use std::hash::{Hash, Hasher};

use rustc_hash::FxHasher;
use smallvec::SmallVec;

use crate::error::{ErrorKind, Result};

/// A dimension of a product: a letter, or a dimension that an ellipsis stands for.
///
/// Letters are numbered in the order of an implicit output, `A` to `Z` before `a` to `z`. Dimensions of ellipses follow, numbered
/// from the last one, because they broadcast from the last one.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub(in crate::ops) struct Label(u8);

/// The labels of the dimensions of one tensor.
pub(in crate::ops) type Term = SmallVec<[Label; 8]>;

/// The number of letters: `A` to `Z` and `a` to `z`.
const LETTERS: u8 = 52;

/// A product of tensors: labels of operands that the output lacks are summed over.
///
/// A label that an operand has twice stands for its diagonal. A label that the output has twice is the inverse, zeros off the
/// diagonal: gradients need it, and no text expresses it.
#[derive(Debug, Clone)]
pub(in crate::ops) struct Equation {
    pub(in crate::ops) inputs: SmallVec<[Term; 2]>,
    pub(in crate::ops) output: Term,
    /// Hash of the labels. Every call of a product hashes its equation, and most equations are built once per program.
    digest: u64,
    /// Whether it is `mk,kn->mn`, with any letters.
    pub(in crate::ops) is_matrix_product: bool,
}

impl Hash for Equation {
    fn hash<H: Hasher>(&self, state: &mut H) {
        state.write_u64(self.digest);
    }
}

impl PartialEq for Equation {
    fn eq(&self, other: &Self) -> bool {
        std::ptr::eq(self, other)
            || self.digest == other.digest && self.inputs == other.inputs && self.output == other.output
    }
}

impl Eq for Equation {}

/// The size of every label of an equation.
pub(in crate::ops) type Sizes = SmallVec<[(Label, usize); 8]>;

impl Label {
    /// The label of a letter.
    pub(in crate::ops) const fn letter(letter: char) -> Label {
        assert!(letter.is_ascii_alphabetic(), "labels are letters");
        let number = if letter.is_ascii_uppercase() { letter as u8 - b'A' } else { letter as u8 - b'a' + 26 };
        Label(number)
    }

    /// Whether it belongs to an ellipsis, whose dimensions broadcast in every product.
    fn is_batch(self) -> bool {
        self.0 >= LETTERS
    }
}

impl fmt::Display for Label {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.0 {
            n @ 0..26 => write!(f, "`{}`", char::from(b'A' + n)),
            n @ 26..LETTERS => write!(f, "`{}`", char::from(b'a' + n - 26)),
            n => write!(f, "dimension -{} of `...`", n - LETTERS + 1),
        }
    }
}

/// The labels of `count` dimensions of an ellipsis.
pub(in crate::ops) fn batch(count: usize) -> impl Iterator<Item = Label> {
    (0..count).rev().map(|from_last| Label(LETTERS + from_last as u8))
}

/// The labels of letters.
pub(in crate::ops) fn letters(text: &str) -> impl Iterator<Item = Label> + '_ {
    text.chars().map(Label::letter)
}

/// The labels of a term, each once.
pub(in crate::ops) fn distinct(term: &[Label]) -> Term {
    let first = |(d, label): (usize, &Label)| !term[..d].contains(label);
    term.iter().enumerate().filter(|&at| first(at)).map(|(_, &label)| label).collect()
}

impl Equation {
    /// An equation from the labels of one or more operands and of the output.
    pub(in crate::ops) fn new(inputs: impl IntoIterator<Item = Term>, output: impl IntoIterator<Item = Label>) -> Self {
        let (inputs, output): (SmallVec<[Term; 2]>, Term) =
            (inputs.into_iter().collect(), output.into_iter().collect());
        let mut hasher = FxHasher::default();
        (&inputs, &output).hash(&mut hasher);
        let is_matrix_product = match (inputs.as_slice(), output.as_slice()) {
            ([left, right], [rows, columns]) => match (left.as_slice(), right.as_slice()) {
                ([m, k], [inner, n]) => m != k && m != n && k != n && [k, m, n] == [inner, rows, columns],
                _ => false,
            },
            _ => false,
        };
        Equation { inputs, output, digest: hasher.finish(), is_matrix_product }
    }

    /// Parses a text such as `...mk,kn->...mn` for operands with these numbers of dimensions, as PyTorch does: spaces are ignored,
    /// an ellipsis stands for the dimensions without letters, and without an arrow the output has those dimensions and then the
    /// letters that occur once, in alphabetical order, capital letters first.
    pub(in crate::ops) fn parse(text: &str, ndims: &[usize]) -> Result<Self> {
        let bad = |why: String| {
            let needed = "one term of letters and at most one `...` per tensor, such as `mk,kn->mn`";
            ErrorKind::Argument.error("equation", format!("`{text}`: {why}"), needed, "correct the equation")
        };
        let plain: String = text.chars().filter(|c| !c.is_whitespace()).collect();
        let (left, right) = plain.split_once("->").map_or((plain.as_str(), None), |(left, right)| (left, Some(right)));
        let terms: Vec<&str> = left.split(',').collect();
        if terms.len() != ndims.len() {
            return Err(bad(format!("{} term(s) for {} tensor(s)", terms.len(), ndims.len())));
        }
        let mut inputs: SmallVec<[Term; 2]> = SmallVec::new();
        let mut stands_for = 0;
        for (term, &ndim) in terms.iter().zip(ndims) {
            let (before, after) = halves(term).map_err(&bad)?;
            let named = before.len() + after.as_ref().map_or(0, Term::len);
            let covered = match ndim.checked_sub(named) {
                Some(covered) if covered == 0 || after.is_some() => covered,
                _ => return Err(bad(format!("`{term}` has {named} dimension(s) for a tensor with {ndim}"))),
            };
            if covered > usize::from(u8::MAX - LETTERS) {
                return Err(bad(format!("`...` stands for {covered} dimensions")));
            }
            stands_for = stands_for.max(covered);
            inputs.push(before.into_iter().chain(batch(covered)).chain(after.into_iter().flatten()).collect());
        }
        let output = match right {
            None => implicit_output(&inputs, stands_for),
            Some(right) => {
                let (before, after) = halves(right).map_err(&bad)?;
                let covered = if after.is_some() { stands_for } else { 0 };
                let output: Term =
                    before.into_iter().chain(batch(covered)).chain(after.into_iter().flatten()).collect();
                let unknown = |label: &&Label| !label.is_batch() && !inputs.iter().any(|term| term.contains(label));
                if let Some(label) = output.iter().find(unknown) {
                    return Err(bad(format!("the output has {label}, which no tensor has")));
                }
                if let Some((_, label)) = output.iter().enumerate().find(|(d, label)| output[..*d].contains(label)) {
                    return Err(bad(format!("the output has {label} twice")));
                }
                output
            }
        };
        Ok(Equation::new(inputs, output))
    }

    /// The size of every label for operands of these shapes. Dimensions of ellipses broadcast, and letters too if `stretches`.
    pub(in crate::ops) fn sizes(&self, name: &str, shapes: &[&[usize]], stretches: bool) -> Result<Sizes> {
        let bad = |needed: String| {
            let found = format!("shapes {shapes:?} in {name}({self})");
            ErrorKind::Argument.error("operands", found, needed, "transpose or reshape the tensors")
        };
        let mut sizes = Sizes::new();
        for (term, shape) in self.inputs.iter().zip(shapes) {
            if term.len() != shape.len() {
                return Err(bad(format!("{} dimension(s) for `{}`", term.len(), TermText(term))));
            }
            for (d, (&label, &n)) in term.iter().zip(*shape).enumerate() {
                if let Some(first) = term[..d].iter().position(|&l| l == label)
                    && shape[first] != n
                {
                    return Err(bad(format!("one size for {label} of a diagonal, found {} and {n}", shape[first])));
                }
                let may_stretch = stretches || label.is_batch();
                match sizes.iter_mut().find(|(known, _)| *known == label) {
                    None => sizes.push((label, n)),
                    Some((_, size)) if *size == n || may_stretch && n == 1 => {}
                    Some((_, size)) if may_stretch && *size == 1 => *size = n,
                    Some((_, size)) => return Err(bad(format!("one size for {label}, found {size} and {n}"))),
                }
            }
        }
        Ok(sizes)
    }
}

/// The size of a label.
pub(in crate::ops) fn size_of(sizes: &[(Label, usize)], label: Label) -> usize {
    sizes.iter().find(|(known, _)| *known == label).map_or(1, |&(_, n)| n)
}

/// The labels before an ellipsis and, if there is one, those after it.
fn halves(term: &str) -> std::result::Result<(Term, Option<Term>), String> {
    let read = |text: &str| {
        let label = |c: char| match c {
            _ if c.is_ascii_alphabetic() => Ok(Label::letter(c)),
            '.' => Err(format!("`{term}` has a `.` that is not part of one `...`")),
            _ => Err(format!("`{c}` is not a letter")),
        };
        text.chars().map(label).collect::<std::result::Result<Term, String>>()
    };
    match term.split_once("...") {
        Some((before, after)) => Ok((read(before)?, Some(read(after)?))),
        None => Ok((read(term)?, None)),
    }
}

/// The dimensions of ellipses, and the letters that occur once in alphabetical order.
fn implicit_output(inputs: &[Term], stands_for: usize) -> Term {
    let all: Vec<Label> = inputs.iter().flatten().copied().collect();
    let once = |label: &Label| !label.is_batch() && all.iter().filter(|other| *other == label).count() == 1;
    let mut letters: Vec<Label> = all.iter().copied().filter(once).collect();
    letters.sort_unstable();
    batch(stands_for).chain(letters).collect()
}

/// A term as text.
struct TermText<'a>(&'a [Label]);

impl fmt::Display for TermText<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (d, label) in self.0.iter().enumerate() {
            match label.is_batch() {
                false => f.write_str(label.to_string().trim_matches('`'))?,
                true if d > 0 && self.0[d - 1].is_batch() => {}
                true => f.write_str("...")?,
            }
        }
        Ok(())
    }
}

impl fmt::Display for Equation {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (i, term) in self.inputs.iter().enumerate() {
            write!(f, "{}{}", if i > 0 { "," } else { "" }, TermText(term))?;
        }
        write!(f, "->{}", TermText(&self.output))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn texts_are_read_as_pytorch_reads_them() {
        for (text, ndims, read) in [
            ("ij,jk", &[2, 2][..], "ij,jk->ik"),
            ("bA,Ac", &[2, 2], "bA,Ac->bc"),
            ("aB", &[2], "aB->Ba"),
            (" i j -> j i ", &[2], "ij->ji"),
            ("...i,...i", &[2, 3], "...i,...i->..."),
            ("...i->i...", &[3], "...i->i..."),
            ("ij->...ij", &[2], "ij->ij"),
            ("i...->i", &[3], "i...->i"),
            ("", &[0], "->"),
            ("i,", &[1, 0], "i,->i"),
        ] {
            assert_eq!(Equation::parse(text, ndims).unwrap().to_string(), read);
        }
        for (text, ndims, why) in [
            ("ij,jk->ik", &[2][..], "2 term(s) for 1 tensor(s)"),
            ("ijk->i", &[2], "`ijk` has 3 dimension(s) for a tensor with 2"),
            ("i->i", &[2], "`i` has 1 dimension(s) for a tensor with 2"),
            ("ij->k", &[2], "the output has `k`, which no tensor has"),
            ("ij->ii", &[2], "the output has `i` twice"),
            ("i..->i", &[2], "`i..` has a `.` that is not part of one `...`"),
            ("...i...->i", &[2], "not part of one `...`"),
            ("i1->i", &[2], "`1` is not a letter"),
            ("ij->ji->", &[2], "`-` is not a letter"),
            ("\u{e9}a->a", &[2], "`\u{e9}` is not a letter"),
        ] {
            let error = Equation::parse(text, ndims).unwrap_err().to_string();
            assert!(error.contains(why), "{text}: {error}");
        }
    }

    #[test]
    fn ellipses_meet_at_the_last_dimension() {
        let equation = Equation::parse("...i,i...", &[3, 2]).unwrap();
        assert_eq!(equation.inputs[0][1], equation.inputs[1][1]);
        let sizes = equation.sizes("einsum", &[&[4, 2, 3], &[3, 2]], false).unwrap();
        let shape: Vec<usize> = equation.output.iter().map(|&label| size_of(&sizes, label)).collect();
        assert_eq!(shape, [4, 2]);
        let error = equation.sizes("einsum", &[&[4, 2, 3], &[3, 5]], false).unwrap_err().to_string();
        assert!(error.contains("one size for dimension -1 of `...`, found 2 and 5"), "{error}");
    }
}
