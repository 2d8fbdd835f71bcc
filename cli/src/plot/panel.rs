//! A chart with its axes, and what is drawn in it.

use plotters::coord::Shift;
use plotters::element::DashedPathElement;
use plotters::prelude::*;

use super::axis::{Axis, Positions};

/// Length of the dashes of a line.
pub const DASH: i32 = 6;
/// Length of the gaps between them.
pub const GAP: i32 = 4;

/// What was measured.
pub const POINT: RGBColor = RGBColor(70, 110, 170);
/// Means of what was measured.
pub const MEAN: RGBColor = RGBColor(20, 40, 80);
/// What the model says.
pub const MODEL: RGBColor = RGBColor(200, 80, 30);
/// What is there for comparison.
pub const GREY: RGBColor = RGBColor(110, 110, 110);

/// Whether drawing succeeded.
pub type Drawn = Result<(), Box<dyn std::error::Error>>;
/// A part of the page.
pub type Area<'a> = DrawingArea<SVGBackend<'a>, Shift>;

/// How a line is drawn.
pub enum Stroke {
    /// Without gaps.
    Solid,
    /// In dashes.
    Dashed,
}

/// A chart with its axes; positions are the axes'.
pub struct Panel<'a, 'b> {
    chart: ChartContext<'a, SVGBackend<'b>, Cartesian2d<Positions, Positions>>,
    x: Axis,
    y: Axis,
}

impl<'a, 'b: 'a> Panel<'a, 'b> {
    /// An empty one with its axes.
    pub fn new(
        area: &'a Area<'b>,
        title: &str,
        x: Axis,
        y: Axis,
    ) -> Result<Self, Box<dyn std::error::Error>> {
        let mut chart = ChartBuilder::on(area)
            .margin(12)
            .margin_right(24)
            .caption(title, ("sans-serif", 16))
            .x_label_area_size(42)
            .y_label_area_size(68)
            .build_cartesian_2d(x.positions(), y.positions())?;
        chart
            .configure_mesh()
            .light_line_style(TRANSPARENT)
            .bold_line_style(BLACK.mix(0.08))
            .label_style(("sans-serif", 12))
            .axis_desc_style(("sans-serif", 14))
            .x_desc(x.label())
            .y_desc(y.label())
            .x_label_formatter(&|&position| x.tick_text(position))
            .y_label_formatter(&|&position| y.tick_text(position))
            .draw()?;
        Ok(Panel { chart, x, y })
    }

    fn at(&self, &(x, y): &(f64, f64)) -> (f64, f64) {
        (self.x.position(x), self.y.position(y))
    }

    /// Pale dots.
    pub fn points(&mut self, points: &[(f64, f64)]) -> Drawn {
        let style = POINT.mix(0.45).filled();
        let points: Vec<_> = points.iter().map(|point| Circle::new(self.at(point), 2, style)).collect();
        self.chart.draw_series(points)?;
        Ok(())
    }

    /// Dots in the colour of a line.
    pub fn dots(&mut self, points: &[(f64, f64)], color: RGBColor) -> Drawn {
        let dots: Vec<_> =
            points.iter().map(|point| Circle::new(self.at(point), 2, color.filled())).collect();
        self.chart.draw_series(dots)?;
        Ok(())
    }

    /// Crosses.
    pub fn marks(&mut self, points: &[(f64, f64)]) -> Drawn {
        let style = MEAN.stroke_width(2);
        let points: Vec<_> = points.iter().map(|point| Cross::new(self.at(point), 4, style)).collect();
        self.chart.draw_series(points)?;
        Ok(())
    }

    /// A line without a name.
    pub fn line(&mut self, points: &[(f64, f64)], color: RGBColor, stroke: Stroke) -> Drawn {
        self.named_line(points, color, stroke, None)
    }

    /// With a name it appears in the panel's own legend.
    pub fn named_line(
        &mut self,
        points: &[(f64, f64)],
        color: RGBColor,
        stroke: Stroke,
        name: Option<&str>,
    ) -> Drawn {
        let style = color.stroke_width(2);
        let points: Vec<_> = points.iter().map(|point| self.at(point)).collect();
        let series = match stroke {
            Stroke::Solid => self.chart.draw_series(LineSeries::new(points, style))?,
            Stroke::Dashed => self.chart.draw_series(DashedLineSeries::new(points, DASH, GAP, style))?,
        };
        if let Some(name) = name {
            // A solid line is one dash.
            let dash = if matches!(stroke, Stroke::Solid) { 20 } else { DASH };
            series
                .label(name)
                .legend(move |(x, y)| DashedPathElement::new([(x, y), (x + 20, y)], dash, GAP, style));
        }
        Ok(())
    }

    /// A surface between two lines.
    pub fn band(&mut self, band: &[(f64, f64, f64)]) -> Drawn {
        let low = band.iter().map(|&(x, low, _)| self.at(&(x, low)));
        let high = band.iter().rev().map(|&(x, _, high)| self.at(&(x, high)));
        let outline: Vec<_> = low.chain(high).collect();
        self.chart.draw_series([Polygon::new(outline, MODEL.mix(0.15).filled())])?;
        Ok(())
    }

    /// The names of its lines.
    pub fn legend(mut self) -> Drawn {
        self.chart
            .configure_series_labels()
            .position(SeriesLabelPosition::LowerRight)
            .margin(8)
            .label_font(("sans-serif", 13))
            .background_style(WHITE.mix(0.85))
            .border_style(BLACK.mix(0.2))
            .draw()?;
        Ok(())
    }
}
