//! The end of a row: stop texts in text that comes in pieces.

/// Why a row ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum StopReason {
    /// The model generated an end token.
    EndToken,
    /// The text contains a stop text.
    StopText,
    /// The row has as many new tokens as were asked for.
    MaxTokens,
    /// The row is as long as the model allows.
    Context,
}

impl StopReason {
    /// The reason in one word, as the command prints it: `eos`, `stop`, `length` or `context`.
    pub fn name(self) -> &'static str {
        match self {
            StopReason::EndToken => "eos",
            StopReason::StopText => "stop",
            StopReason::MaxTokens => "length",
            StopReason::Context => "context",
        }
    }
}

/// Finds stop texts in text that comes in pieces, and holds back what may be the beginning of one.
#[derive(Debug, Default)]
pub(super) struct StopTexts {
    texts: Vec<String>,
    held: String,
}

impl StopTexts {
    pub(super) fn new(texts: &[String]) -> Self {
        StopTexts { texts: texts.to_vec(), held: String::new() }
    }

    /// Adds a piece; returns the text that is certain, and whether a stop text follows it.
    pub(super) fn push(&mut self, piece: &str) -> (String, bool) {
        self.held += piece;
        if let Some(at) = self.texts.iter().filter_map(|text| self.held.find(text)).min() {
            self.held.truncate(at);
            return (std::mem::take(&mut self.held), true);
        }
        // The longest end of the text that is the beginning of a stop text.
        let begins = |&at: &usize| self.texts.iter().any(|text| text.starts_with(&self.held[at..]));
        let ends = self.held.char_indices().map(|(at, _)| at);
        let certain = ends.into_iter().find(begins).unwrap_or(self.held.len());
        let rest = self.held.split_off(certain);
        (std::mem::replace(&mut self.held, rest), false)
    }

    /// Returns what was held back.
    pub(super) fn finish(&mut self) -> String {
        std::mem::take(&mut self.held)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn stop_texts_over_several_pieces_are_found_and_nothing_else_is_lost() {
        let stops = |texts: &[&str], pieces: &[&str]| {
            let mut stop = StopTexts::new(&texts.iter().map(|text| (*text).to_string()).collect::<Vec<_>>());
            let mut text = String::new();
            for piece in pieces {
                let (certain, ended) = stop.push(piece);
                text += &certain;
                if ended {
                    return (text, true);
                }
            }
            (text + &stop.finish(), false)
        };
        assert_eq!(stops(&["END"], &["a", " E", "N", "D tail"]), ("a ".into(), true));
        assert_eq!(stops(&["END"], &["a", " E", "N", "Ed"]), ("a ENEd".into(), false));
        assert_eq!(stops(&["\n\n", "User:"], &["x\nU", "ser", ":"]), ("x\n".into(), true));
        assert_eq!(stops(&["aab"], &["aa", "ab", "c"]), ("a".into(), true));
        assert_eq!(stops(&["éé"], &["é", "x"]), ("éx".into(), false));
        assert_eq!(stops(&["b", "abc"], &["zab", "c"]), ("za".into(), true));
        assert_eq!(stops(&[], &["a", "b"]), ("ab".into(), false));
    }
}
