//! Plain tables for the terminal.

/// Prints rows in aligned columns, the first one left-aligned and the others right-aligned.
pub(crate) fn print(header: &[&str], rows: &[Vec<String>]) {
    let mut widths: Vec<usize> = header.iter().map(|cell| cell.chars().count()).collect();
    for row in rows {
        for (width, cell) in widths.iter_mut().zip(row) {
            *width = (*width).max(cell.chars().count());
        }
    }
    let line = |cells: &[String]| {
        let mut text = String::new();
        for (i, (cell, &width)) in cells.iter().zip(&widths).enumerate() {
            let padding = " ".repeat(width - cell.chars().count());
            if i == 0 {
                text += &format!("  {cell}{padding}");
            } else {
                text += &format!("  {padding}{cell}");
            }
        }
        text.trim_end().to_owned()
    };
    println!("{}", line(&header.iter().map(|&cell| cell.to_owned()).collect::<Vec<_>>()));
    for row in rows {
        println!("{}", line(row));
    }
}
