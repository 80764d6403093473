// Sets the chosen theme before the page is painted. Without a choice the system's theme applies.
document.documentElement.style.colorScheme = localStorage.getItem("art-theme") ?? "";
